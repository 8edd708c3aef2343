"""JSON Schema to automata: which texts are JSON that a schema allows, in one canonical spelling.

`lower.py` is the entrance. `document.py` reads keywords and references in the schema's own draft,
`expand.py` turns claims about schemas into unions of shapes (`shapes.py`), and the others spell shapes
as text: `strings.py`, `numbers.py`, `arrays.py`, `objects.py`.
"""
