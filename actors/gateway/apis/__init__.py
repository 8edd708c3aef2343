"""The APIs of other servers on the same port, a folder each. Each builds on `port/dialogues`."""
