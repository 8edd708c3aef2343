"""The executor actor: the engine's link to what runs the model, in a thread or a process.

Begin with `actor.start_executor`. `runner` is the loop that both placements share,
`copier` what moves KV between the host memory of executors.
"""
