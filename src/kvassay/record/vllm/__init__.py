"""Recording inside a live vLLM engine: a capture folder first, step by step, and traces made from it afterwards.

`engine` looks into vLLM and is all that needs it; `capture` is the folder it fills; `sequences`, `tables` and
`assemble` turn a folder into traces anywhere; `offline` runs a workload; `plugin` is what a running server loads,
and `served` makes traces of its capture.
"""
