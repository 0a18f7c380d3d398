"""Run from test_server.py, in a process of its own, for there is one vLLM per process. Prints one JSON object as its last line.

python tests/helpers/server_worker.py MODEL        rollouts of the in-process engine with the weights and seeds that test_server.py gives its servers
"""

import json
import sys

import torch
from engine_worker import PROMPTS, perturb, sampling, start
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollout
from policy import named_weights

if __name__ == "__main__":
    _, engine = start("vllm", sys.argv[1])
    lm, tokenizer = (
        AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32),
        AutoTokenizer.from_pretrained(sys.argv[1]),
    )
    found = []
    for i in range(2):
        perturb(lm, i)
        engine.sync(named_weights(lm, 0))
        found.append(rollout.generate(engine, tokenizer, PROMPTS, 8, sampling(i, 3)))
    print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()
