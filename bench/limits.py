"""What a step of ours costs beside the least that it could cost: the arm "limits" of
`python -m bench`."""

import time

from bench.arms import checked_config, never_end, tokens_of_ours
from bench.scenarios import END, LONGEST_PROMPT, parts, prepare, read_rows


def limits(scenario: str, beta: float, steps: int) -> tuple:
    """Times the two halves of a step beside the least that they could cost: the learning phase
    beside a bare forward and backward of the same tokens, rollouts beside vLLM's own generate. They
    take turns in one process. beta is ignored. There is no first step, so its time is 0."""
    import torch

    import rollout
    from ranks import start_distributed

    device = start_distributed().device
    folder = prepare(scenario)
    # the keys that the engine and the learner read
    settings = {
        "model": folder,
        "objective": "dr_grpo",
        "importance_sampling": "none",
        "beta": 0.0,
        "max_prompt_length": LONGEST_PROMPT,
        "max_completion_length": parts(scenario)["T"],
    }
    config = checked_config(settings)
    sampler = rollout.VllmEngine(str(folder), config, torch.float32, device)
    never_end(sampler)
    roll, vllm = rollouts_and_limit(sampler, scenario)
    batch = rollout.to_batch(roll(), device)
    learn, bare, forget = learning_and_limit(batch, scenario, config)

    found = []
    for i in range(steps):
        # the order alternates, so that neither gains by what the first leaves in the caches
        order = (learn, bare, roll, vllm) if i % 2 else (bare, learn, vllm, roll)
        times = {}
        for work in order:
            sampler.llm.reset_prefix_cache()  # or the second one would find its prompts there
            begin = time.perf_counter()
            work()
            times[work.__name__] = time.perf_counter() - begin
        forget()
        times["learn / bare"] = times["learn"] / times["bare"]
        times["vllm / rollout"] = times["vllm"] / times["roll"]
        found.append(times)
    return 0.0, found


def rollouts_and_limit(sampler, scenario: str) -> tuple:
    """Two functions: rollouts as train.py asks for them, and the same completions from vLLM's own
    generate."""
    import rollout
    from preflight import load_model_files

    size = parts(scenario)
    folder = prepare(scenario)
    tokenizer = load_model_files(str(folder)).tokenizer
    prompts = []
    for row in read_rows(folder)[: size["P"]]:
        prompts.append(tokenizer(row["prompt"])["input_ids"])
    # one seed per prompt, the same for both, so that they sample the same tokens
    seeds = list(range(size["P"]))

    def roll():
        sampling = rollout.Sampling(
            temperature=1.0,
            max_tokens=size["T"],
            stop_token_ids=[END],
            seeds=seeds,
        )
        return rollout.generate(sampler, tokenizer, prompts, size["G"], sampling)

    def vllm():
        params = []
        for seed in seeds:
            one = sampler.vllm.SamplingParams(
                n=size["G"],
                temperature=1.0,
                max_tokens=size["T"],
                seed=seed,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            params.append(one)
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        sampler.llm.generate(requests, params, use_tqdm=False)

    return roll, vllm


def learning_and_limit(batch: dict, scenario: str, config: dict) -> tuple:
    """Three functions: the learning phase; a bare forward and backward of the same tokens, with
    logits for the completions only; and one that makes both forget their gradients."""
    import torch
    from transformers import AutoModelForCausalLM

    import learner
    import train

    size = parts(scenario)
    engine = train.load_policy(config, torch.device("cpu"))
    lm = AutoModelForCausalLM.from_pretrained(prepare(scenario), dtype=torch.float32).train()
    config = config | {"max_tokens_per_micro_batch": tokens_of_ours(scenario, lm)}
    # (P, G), all different, so that every row has an advantage and is learned from
    rewards = torch.rand(size["P"], size["G"], generator=torch.Generator().manual_seed(0))
    lengths = batch["lengths"].view(size["P"], size["G"])
    measured = learner.GroupMeasures(rewards, rewards, lengths)
    targets = learner.group_targets(measured, 0.0, 0.0, config)
    counts = learner.step_counts(targets, lengths)
    begins = int(batch["prompt_lengths"][0])  # all prompts have one length

    def learn():
        batch.pop("old_logps", None)  # each time is the first update of its batch
        learner.accumulate_gradients(engine, batch, targets, 0.0, config, counts)

    def bare():
        output = lm.base_model(input_ids=batch["ids"], use_cache=False)
        hidden = output.last_hidden_state[:, begins - 1 : -1]  # (N, T, width)
        logits = lm.lm_head(hidden).flatten(0, 1)  # (N * T, V)
        sampled = batch["ids"][:, begins:].flatten()  # (N * T,)
        torch.nn.functional.cross_entropy(logits, sampled).backward()

    def forget():
        # kept as zeros, so that neither has to allocate its gradients
        engine.optimizer.zero_grad(set_to_none=False)
        lm.zero_grad(set_to_none=False)

    return learn, bare, forget
