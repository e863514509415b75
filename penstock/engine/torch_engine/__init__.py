"""The embedded engine, part by part.

build.py      a model directory becomes a running engine
engine.py     the async front: one thread that steps, an event loop that never waits for it
scheduler.py  which requests run; one step = admit, compute prompts, decode, sample, end the finished
slots.py      the running answers as columns
row.py        one request on its way: its context, budget and stop strings
prefix.py     prompts computed once and shared by a group
cache.py      keys and values, one slot per running answer
attention.py  one new token per slot over the cache, and a prompt over itself
model.py      what the scheduler asks of a model
products.py   hidden states times weights, by dtype and machine
lanes.py      a decode step split by rows, where that is faster
forward.py    fused forward of the Llama and Qwen families
generic.py    any transformers causal LM through its own forward
weights.py    Hugging Face names to places in the engine's layout, all or nothing
scratch.py    memory that is kept between steps
sampling.py   logits and one uniform per row to a token and its logprob
"""
