"""One module for each engine, imported only inside that engine's environment.

`library` of each is a class, made by `library(model, threads, max_requests, max_length)`, with `version`, `notes`
(settings worth recording) and `run(prompts, max_tokens)`: it sends all prompts at once, greedy and ignoring end-of-
sequence, and returns for each prompt, in order, `(token_ids, first_token_at, finished_at)` on the clock of
`time.perf_counter`. `max_tokens` has one number for each prompt. Engine settings are further keyword arguments, where
an adapter supports them; `counters` holds those of the last run (preemptions, recomputed tokens), where an engine
counts them.
"""
