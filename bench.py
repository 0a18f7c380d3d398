"""Our step beside that of TRL's GRPOTrainer, and beside the least that it could cost: one model, prompts, reward, group, lengths; float32, CPU, 2 threads.

    python bench.py                                             everything, an hour and a quarter on two cores; tables, and runs/bench/growth.png
    python bench.py P4G8T64V2048 --against=trl --repeats=5      one comparison
    python bench.py P4G8T64V2048 --arm=ours                     one run of one arm (ours, ours_compiled, trl, trl_vllm, limits), as JSON

First it has tests/test_trl_oracle.py show that both compute the same loss on the same batch. Then every run is a process of its own, in the order A B B A ...;
what is reported is the ratio of neighbours, ours / theirs, median and quartiles: these machines are noisy, ratios less so. A scenario is P prompts a
step, G completions of each, T tokens in each and V tokens in the vocabulary; "tail" ends completions by chance, 64 tokens long on average and T at most. The
model is a Qwen2 of 4 layers and width 128 with random weights. trl generates with transformers, trl_vllm with vLLM in process, which TRL leaves compiled:
beside it ours compiles too (vllm_enforce_eager="no"); beside trl it runs as it does by default.
"""
import json
import math
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

STARTED = time.perf_counter()
ROOT = Path(__file__).resolve().parent
COMPARISONS = [("P4G8T64V2048", "trl", 0.0), ("P4G8T64V2048", "trl_vllm", 0.0), ("P4G8T64V2048", "trl", 0.04), ("P4G8T64V2048", "trl_vllm", 0.04),
               ("P4G8T256V2048", "trl", 0.0), ("P4G8T64V32768", "trl", 0.0), ("P4G8T512V2048tail", "trl", 0.0), ("P4G4T64V2048", "trl", 0.0),
               ("P4G16T64V2048", "trl", 0.0), ("P4G32T64V2048", "trl", 0.0)]
LIMITS = ["P4G8T64V2048", "P4G8T256V2048", "P4G8T64V32768"]
GROWTH = {"G": [4, 8, 16, 32, 64], "P": [2, 4, 8, 16], "T": [32, 64, 128, 256], "V": [2048, 8192, 32768]}      # the others as in P4G8T64V2048
GROWTH_STEPS = 5
STEPS, WARM = 8, 3      # steps of a run, and how many of its first do not count
MEASURES = ["step", "learn", "memory", "start"]


# --- what both arms share

def parts(scenario: str) -> dict:
    return {name: int(number) for name, number in re.findall(r"([PGTV])(\d+)", scenario)}


def prepare(scenario: str) -> Path:
    """A folder with model, tokenizer and prompts; both arms read the same."""
    from transformers import GenerationConfig, Qwen2Tokenizer

    import sft
    V, folder = parts(scenario)["V"], Path(tempfile.gettempdir()) / f"bench_{os.getuid()}_{scenario}"
    if (folder / "rows.jsonl").exists():
        return folder
    vocabulary = ["<|end|>", *(chr(i) for i in range(33, 127)), "\u0120"]
    vocabulary += [f"\u0120w{i}" for i in range(V - len(vocabulary))]
    tokenizer = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], eos_token="<|end|>", pad_token="<|end|>")
    sft.tiny_model(V, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=ends(scenario), pad_token_id=0).save_pretrained(folder)
    rows = [{"prompt": f"{i * 7919 % 1000:03d}+{i * 104729 % 1000:03d}=".rjust(20, "x"), "answer": "0"} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def ends(scenario: str) -> list[int]:
    """Tokens that end a completion: with random weights one in 64 of them makes lengths geometric."""
    return [0, *range(100, 99 + parts(scenario)["V"] // 64)] if scenario.endswith("tail") else [0]


def reward(completion: str, answer, **row) -> float:
    """Cheap, and different within a group."""
    return len(set(completion)) / 100


def never_end(engine) -> None:
    """EOS does not end a completion of this vLLM engine of ours."""
    make = engine.vllm.SamplingParams
    engine.vllm = SimpleNamespace(SamplingParams=lambda **settings: make(**settings | {"stop_token_ids": [], "ignore_eos": True}))


def memory_so_far() -> float:
    """Most that this process has held, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def weighed(work):
    """(what work() returns, GiB of tensors that it held at most beyond those before it)."""
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = work()
    events = sorted((event.start_ns(), event.nbytes()) for event in found.profiler.kineto_results.events() if event.name() == "[memory]")
    return result, max(accumulate(size for _, size in events)) / 2**30


# --- arms: (seconds to the first step, [{"step": s, "learn": s, ...} of each step])

def ours(scenario: str, beta: float, steps: int, **more) -> tuple:
    """train.py, one rank, vLLM in process."""
    import experience
    import learner
    import rollout
    import train
    (P, G, T, _), folder, out = parts(scenario).values(), prepare(scenario), Path(tempfile.mkdtemp()) / "run"
    start, collect, learn, first, peaks = rollout.VllmEngine.__init__, experience.collect, learner.accumulate_gradients, [], {}

    def forced(engine, *args):
        start(engine, *args)
        never_end(engine)

    def noted(*args):
        first.append(time.perf_counter())
        return collect(*args)

    def learn_or_weigh(*args):      # one more step is weighed, which takes time and memory and does not count for either
        if len(first) <= steps:
            return learn(*args)
        peaks["memory"] = memory_so_far()
        metrics, peaks["learner"] = weighed(lambda: learn(*args))
        return metrics
    experience.collect, learner.accumulate_gradients = noted, learn_or_weigh
    if not scenario.endswith("tail"):
        rollout.VllmEngine.__init__ = forced
    settings = dict(model=folder, dataset_name=folder / "rows.jsonl", output_dir=out, prompts_per_step=P, num_generations=G, max_completion_length=T,
                    max_prompt_length=32, reward_funcs=["bench:reward"], objective="dr_grpo", importance_sampling="none", beta=beta, max_steps=steps + 1, save_steps=-1,
                    learning_rate=1e-5, max_logp_difference=-1, max_tokens_per_micro_batch=4096, reward_workers=0)
    train.main([f"--{key}={value}" for key, value in (settings | more).items()])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][:steps]
    found = [{"step": line["time/step"], "learn": line["time/learn"] + line["time/score"], "rollout": line["time/rollout"]} for line in lines]
    return first[0], [one | {"rest": 1 - (one["learn"] + one["rollout"]) / one["step"], **peaks} for one in found]


def ours_compiled(scenario: str, beta: float, steps: int) -> tuple:
    return ours(scenario, beta, steps, vllm_enforce_eager="no")


def trl(scenario: str, beta: float, steps: int, **more) -> tuple:
    """TRL's GRPOTrainer with transformers generation."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    (P, G, T, _), folder, found, marks = parts(scenario).values(), prepare(scenario), [], {}
    tail = scenario.endswith("tail")
    settings = dict(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=P * G, num_generations=G, max_completion_length=T, max_steps=steps, learning_rate=1e-5,
                    beta=beta, loss_type="dr_grpo", scale_rewards="none", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
                    logging_strategy="no", disable_tqdm=True, generation_kwargs={"eos_token_id": ends(scenario)} if tail else {"min_new_tokens": T}, temperature=1.0)

    class Clock(TrainerCallback):
        def on_step_begin(self, *a, **k):
            marks.update(begin=time.perf_counter(), generate=0.0)
            marks.setdefault("first", marks["begin"])

        def on_step_end(self, *a, **k):
            total = time.perf_counter() - marks["begin"]
            found.append({"step": total, "learn": total - marks["generate"], "rollout": marks["generate"]})
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(model=AutoModelForCausalLM.from_pretrained(folder), args=GRPOConfig(**settings | more), processing_class=AutoTokenizer.from_pretrained(folder),
                          reward_funcs=lambda completions, **k: [reward(text, "") for text in completions], train_dataset=Dataset.from_list(rows), callbacks=[Clock()])
    generate = trainer._generate

    def timed(*a, **k):
        begin = time.perf_counter()
        try:
            return generate(*a, **k)
        finally:
            marks["generate"] += time.perf_counter() - begin
    trainer._generate = timed
    trainer.train()
    return marks["first"], found


def trl_vllm(scenario: str, beta: float, steps: int) -> tuple:
    """The same with vLLM in process. TRL's own sync of weights fails on vLLM's CPU build, so it gets ours; it counts as generation.
    Of memory it can't be given less than 1 GiB for keys and values, ours takes 0.25."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR",
                          RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    from trl.generation.vllm_generation import VLLMGeneration

    from policy import named_weights

    def sync(self):
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_weights(self.model, 0)})
        self.llm.reset_prefix_cache()
    VLLMGeneration.sync_weights = sync
    forced = {"stop_token_ids": ends(scenario)} if scenario.endswith("tail") else {"ignore_eos": True}
    return trl(scenario, beta, steps, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=32 + parts(scenario)["T"], generation_kwargs=forced)


def limits(scenario: str, beta: float, steps: int) -> tuple:
    """What a step's two halves cost beside the least they could: the learning phase and a bare forward and backward of the same model on the same tokens with
    logits for the completions only; rollouts and vLLM's own generate. In turns, one process."""
    import torch
    from transformers import AutoModelForCausalLM

    import learner
    import rollout
    import train
    from common import load_config
    from prompts import load_model_files
    from ranks import start_distributed
    (P, G, T, _), folder = parts(scenario).values(), prepare(scenario)
    _, _, device = start_distributed()
    c = load_config([f"--{key}={value}" for key, value in dict(
        model=folder, objective="dr_grpo", importance_sampling="none", beta=0.0, max_tokens_per_micro_batch=4096, max_prompt_length=32, max_completion_length=T).items()])
    sampler, tokenizer = rollout.VllmEngine(str(folder), c, torch.float32, device), load_model_files(str(folder), "")[1]
    engine, lm = train.load_policy(c, torch.float32), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in (folder / "rows.jsonl").read_text().splitlines()[:P]]
    make, found = sampler.vllm.SamplingParams, []
    never_end(sampler)

    def roll():
        sampling = {"temperature": 1.0, "max_tokens": T, "stop_token_ids": [0], "seeds": list(range(P))}
        return rollout.generate(sampler, tokenizer, prompts, G, sampling)

    def vllm():
        params = [make(n=G, temperature=1.0, max_tokens=T, ignore_eos=True, seed=i, logprobs=0, flat_logprobs=True, detokenize=False) for i in range(P)]
        sampler.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    batch = rollout.to_batch(roll(), device)
    group = {"rewards": torch.rand(P, G, generator=torch.Generator().manual_seed(0)), "lengths": batch["lengths"].view(P, G)}
    targets = learner.group_targets(group, 0.0, 0.0, c)
    norm, begins = learner.step_counts(targets, group["lengths"]), int(batch["prompt_lengths"][0])      # prompts are of one length

    def learn():
        batch.pop("old_logps", None)
        learner.accumulate_gradients(engine, batch, targets, 0.0, c, norm)

    def bare():
        hidden = lm.base_model(input_ids=batch["ids"], use_cache=False).last_hidden_state[:, begins - 1:-1]
        torch.nn.functional.cross_entropy(lm.lm_head(hidden).flatten(0, 1), batch["ids"][:, begins:].flatten()).backward()
    for i in range(steps):
        times = {}
        for work in (learn, bare, roll, vllm) if i % 2 else (bare, learn, vllm, roll):
            sampler.llm.reset_prefix_cache()
            begin = time.perf_counter()
            work()
            times[work.__name__] = time.perf_counter() - begin
        engine.optimizer.zero_grad(set_to_none=False)
        lm.zero_grad(set_to_none=False)
        found.append(times | {"learn / bare": times["learn"] / times["bare"], "vllm / rollout": times["vllm"] / times["roll"]})
    return 0.0, found


# --- runs and tables

ARMS = {"ours": ours, "ours_compiled": ours_compiled, "trl": trl, "trl_vllm": trl_vllm, "limits": limits}


def run_arm(arm: str, scenario: str, beta: float, steps: int) -> None:
    first, times = ARMS[arm](scenario, beta, steps)
    result = {name: statistics.median(one[name] for one in times[WARM:]) for name in times[0]}
    print("\nresult " + json.dumps({"memory": memory_so_far(), "start": first - STARTED} | result), flush=True)


def result_of(done: subprocess.CompletedProcess) -> dict | None:
    """What the last "result" line of a run holds; None if the run failed."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    return None if done.returncode or not lines else json.loads(lines[-1].removeprefix("result "))


def measure(arm: str, scenario: str, beta: float = 0.0, steps: int = STEPS) -> dict:
    """One run in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, __file__, f"--arm={arm}", scenario, f"--beta={beta}", f"--steps={steps}"], cwd=ROOT, capture_output=True, text=True,
                          timeout=1800, env=environment)
    return result_of(done) or sys.exit(f"error: {arm} {scenario} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def compare(scenario: str, against: str, beta: float, repeats: int) -> str:
    """One row of the table."""
    mine, pairs = "ours_compiled" if against == "trl_vllm" else "ours", []
    for i in range(repeats):
        order = (mine, against) if i % 2 == 0 else (against, mine)
        pairs.append({arm: measure(arm, scenario, beta) for arm in order})
        print(f"{scenario} {i + 1}/{repeats}: " + ", ".join(f"{arm} {one['step']:.3f} s a step, {one['memory']:.2f} GiB" for arm, one in pairs[-1].items()), flush=True)
    cells = [scenario, against, f"{beta}"]
    for name in MEASURES:
        ratios = [pair[mine][name] / pair[against][name] for pair in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4) if repeats > 1 else ratios * 3
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    cells.append(" / ".join(f"{statistics.median(pair[arm]['step'] for pair in pairs):.2f}" for arm in (mine, against)) + " s")
    cells.append(f"{statistics.median(pair[mine]['rest'] for pair in pairs):.1%}")
    return "| " + " | ".join(cells) + " |"


def slope(sizes: list, values: list) -> float:
    """Of log value over log size, least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


def growth(path: Path) -> None:
    """How a step grows with each size while the others stay, drawn and fitted; in the picture, dashed, also a step of TRL's."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(2, len(GROWTH), figsize=(14, 6), sharex="col")
    print("\n| grows | sizes | slope of a step | of rollouts | of learning | GiB at peak | of it the learner's tensors |", "|---" * 7 + "|", sep="\n")
    for (name, sizes), (above, below) in zip(GROWTH.items(), axes.T):
        runs, theirs = ([measure(arm, re.sub(rf"{name}\d+", f"{name}{size}", "P4G8T64V2048"), steps=GROWTH_STEPS) for size in sizes] for arm in ("ours", "trl"))
        slopes = [slope(sizes, [run[what] for run in runs]) for what in ("step", "rollout", "learn")]
        memory, tensors = ([run[what] for run in runs] for what in ("memory", "learner"))
        cells = [name, ", ".join(map(str, sizes)), *(f"{one:.2f}" for one in slopes), *(", ".join(f"{one:.2f}" for one in found) for found in (memory, tensors))]
        print("| " + " | ".join(cells) + " |", flush=True)
        for what in ("step", "rollout", "learn"):
            drawn = above.loglog(sizes, [run[what] for run in runs], "o-", label=what)
            above.loglog(sizes, [run[what] for run in theirs], "o--", color=drawn[0].get_color(), label=f"{what}, TRL")
        above.set_title(f"{name}: slope of a step {slopes[0]:.2f}")
        above.yaxis.set_major_formatter("{x:g}")
        above.yaxis.set_minor_formatter("")
        below.semilogx(sizes, memory, "ko-", label="process")
        below.semilogx(sizes, [run["memory"] for run in theirs], "ko--", label="process, TRL")
        below.semilogx(sizes, tensors, "o:", label="the learner's tensors")
        below.set_ylim(bottom=0)
        below.set_xlabel(name)
        below.set_xticks(sizes, map(str, sizes))
        below.minorticks_off()
    axes[0, 0].set_ylabel("seconds")
    axes[1, 0].set_ylabel("GiB at peak")
    axes[0, 0].legend()
    axes[1, 0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"drawn: {path}")


def main(argv: list[str]) -> None:
    flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in argv if flag.startswith("--"))
    scenarios, beta, repeats = [name for name in argv if not name.startswith("--")], float(flags.get("beta", 0.0)), int(flags.get("repeats", 5))
    if "arm" in flags:
        return run_arm(flags["arm"], scenarios[0], beta, int(flags.get("steps", STEPS)))
    oracle = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/test_trl_oracle.py", "-k", "dr_grpo"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    print("the same loss on the same batch (tests/test_trl_oracle.py):", oracle.stdout.strip().splitlines()[-1], flush=True)
    if oracle.returncode:
        sys.exit(oracle.stdout)
    rows = [compare(*one, repeats) for one in ([(name, flags.get("against", "trl"), beta) for name in scenarios] or COMPARISONS)]
    print("\nours / theirs, median (quartiles):\n")
    print("| scenario | against | β | seconds a step | learning phase | peak memory | start to first step | a step | neither learning nor rollouts, ours |",
          "|---" * 9 + "|", *rows, sep="\n", flush=True)
    if scenarios:
        return
    print("\n| scenario | learning / bare forward and backward | vLLM's own time / rollouts |", "|---" * 3 + "|", sep="\n")
    for scenario in LIMITS:
        found = [measure("limits", scenario, steps=12) for _ in range(repeats)]
        print(f"| {scenario} |", *(f"{statistics.median(one[what] for one in found):.2f} |" for what in ("learn / bare", "vllm / rollout")), flush=True)
    growth(ROOT / "runs" / "bench" / "growth.png")


if __name__ == "__main__":
    main(sys.argv[1:])
