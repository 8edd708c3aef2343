"""`ramify bench`: one load generator for this server and for any that streams over HTTP.

    workloads.py  what is asked: programs of token ids, pure      shapes.py     models without weights
    program.py    the words: Job, Level, Program, Trace           server.py     a server to measure
    session.py    what a driver offers: sessions of lines         stats.py      percentiles, spread
    ramify.py, history.py (sglang.py, openai.py)   the drivers    figures.py    numbers from traces
    websocket.py, http.py   cheap connections                     report.py     tables, JSON
    execute.py, crowd.py    run programs, in 1 or N processes     plot.py       pictures

It imports `ramify.protocol` and the client library only, never torch.
"""
