"""What the executor follows, of an automaton of the compiler."""

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.automaton_words import rows_of, words_of
from ramify.actors.grammar.forced_texts import forced_texts
from ramify.gpu.constraints.byte_automaton import ByteAutomaton, read_words
from ramify.gpu.constraints.masks import MaskStore
from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary


def byte_automaton(automaton: Automaton) -> ByteAutomaton:
    """What a compile worker sends."""
    rows = rows_of(automaton)
    return read_words(words_of(automaton, rows), forced_texts(automaton, rows))


def machine_of(
    vocabulary: Vocabulary, automaton: Automaton, store: MaskStore | None = None
) -> TokenAutomaton:
    """`automaton` over the tokens of `vocabulary`."""
    return TokenAutomaton(vocabulary, byte_automaton(automaton), store)
