"""Makes every environment that the comparisons need."""

from peers import trl_python, vllm_python

print(trl_python())
print(vllm_python())
