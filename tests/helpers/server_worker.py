"""Run by test_server_vllm.py, in a process of its own, for there is one vLLM per process. Prints
rollouts of the in-process engine as its last line, with the weights and seeds that
test_server_vllm.py gives its servers.

    python tests/helpers/server_worker.py MODEL
"""

import json
import sys

import torch
from engine_worker import PROMPTS, perturb, sampling, start

import rollout
from policy import named_weights

if __name__ == "__main__":
    engine, lm, tokenizer = start("vllm", sys.argv[1])
    found = []
    for i in range(2):
        perturb(lm, i)
        engine.sync(named_weights(lm, 0))
        found.append(rollout.generate(engine, tokenizer, PROMPTS, 8, sampling(i, 3)))
    print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()
