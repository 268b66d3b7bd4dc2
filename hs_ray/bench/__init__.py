"""Speed, as ratios to the bare engine in one run: what `jobs/bench.py` prints.

prompts   token ids of given lengths
plot      the result as bars
ways      bare engine, capture, capture + write, transformers + hooks: each in a process of its own
timing    interleaved repeats, medians, the table
"""
