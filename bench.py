"""Our step beside that of TRL's GRPOTrainer: the same model, prompts, reward, group and forced completion length, float32, CPU, 2 threads.

    python bench.py                                     all scenarios, about an hour on two cores
    python bench.py P4G8T64V2048 --repeats=5            one of them
    python bench.py --arm=ours P4G8T64V2048             one run of one arm, as JSON

First it has tests/test_trl_oracle.py show that both compute the same loss on the same batch. Then every run is a process of its own, in the order A B B A ...;
what is reported is the ratio of neighbours, ours / theirs, median and quartiles: these machines are noisy, ratios less so. A scenario is P prompts a
step, G completions of each, T tokens in each and V tokens in the vocabulary; the model is a Qwen2 of 4 layers and width 128 with random weights.
"""
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

STARTED = time.perf_counter()
ROOT = Path(__file__).resolve().parent
SCENARIOS = ["P4G8T64V2048", "P4G8T256V2048", "P4G8T64V32768", "P4G4T64V2048", "P4G16T64V2048", "P4G32T64V2048"]
STEPS, WARM = 8, 3      # steps of a run, and how many of its first do not count


def parts(scenario: str) -> dict:
    return {name: int(number) for name, number in re.findall(r"([PGTV])(\d+)", scenario)}


def prepare(scenario: str) -> Path:
    """A folder with model, tokenizer and prompts; both arms read the same."""
    from transformers import Qwen2Tokenizer

    import sft
    V, folder = parts(scenario)["V"], Path(tempfile.gettempdir()) / f"bench_{os.getuid()}_{scenario}"
    if (folder / "rows.jsonl").exists():
        return folder
    vocabulary = ["<|end|>", *(chr(i) for i in range(33, 127)), "\u0120"]
    vocabulary += [f"\u0120w{i}" for i in range(V - len(vocabulary))]
    tokenizer = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], eos_token="<|end|>", pad_token="<|end|>")
    sft.tiny_model(V, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": f"{i * 7919 % 1000:03d}+{i * 104729 % 1000:03d}=".rjust(20, "x"), "answer": "0"} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def reward(completion: str, answer, **row) -> float:
    """Cheap, and different within a group."""
    return len(set(completion)) / 100


def ours(folder: Path, P: int, G: int, T: int, V: int, beta: float) -> list[dict]:
    """Our train.py, one rank, vLLM in process; EOS does not end a completion."""
    import rollout
    import train
    start = rollout.VllmEngine.__init__

    def forced(engine, *args):
        start(engine, *args)
        params = engine.vllm.SamplingParams
        engine.vllm = SimpleNamespace(SamplingParams=lambda **settings: params(**settings | {"stop_token_ids": [], "ignore_eos": True}))
    rollout.VllmEngine.__init__ = forced
    out = Path(tempfile.mkdtemp()) / "run"
    rows = folder / "rows.jsonl"
    settings = dict(model=folder, dataset_name=rows, output_dir=out, prompts_per_step=P, num_generations=G, max_completion_length=T, max_prompt_length=32,
                    reward_funcs=["bench:reward"], objective="dr_grpo", importance_sampling="none", beta=beta, max_steps=STEPS, save_steps=-1, learning_rate=1e-5,
                    max_logp_difference=-1, max_tokens_per_micro_batch=4096, reward_workers=0)
    train.main([f"--{key}={value}" for key, value in settings.items()])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{"step": line["time/step"], "learn": line["time/learn"] + line["time/score"]} for line in lines]


def trl(folder: Path, P: int, G: int, T: int, V: int, beta: float) -> list[dict]:
    """TRL's GRPOTrainer with transformers generation."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    args = GRPOConfig(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=P * G, num_generations=G, max_completion_length=T, max_steps=STEPS, learning_rate=1e-5,
                      beta=beta, loss_type="dr_grpo", scale_rewards="none", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
                      logging_strategy="no", disable_tqdm=True, generation_kwargs={"min_new_tokens": T}, temperature=1.0)
    found, marks = [], {}

    class Clock(TrainerCallback):
        def on_step_begin(self, *a, **k):
            marks.update(begin=time.perf_counter(), generate=0.0)

        def on_step_end(self, *a, **k):
            total = time.perf_counter() - marks["begin"]
            found.append({"step": total, "learn": total - marks["generate"]})
    trainer = GRPOTrainer(model=AutoModelForCausalLM.from_pretrained(folder), args=args, processing_class=AutoTokenizer.from_pretrained(folder),
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
    return found


ARMS = {"ours": ours, "trl": trl}


def run_arm(arm: str, scenario: str, beta: float) -> None:
    steps = ARMS[arm](prepare(scenario), **parts(scenario), beta=beta)
    result = {name: statistics.median(step[name] for step in steps[WARM:]) for name in ("step", "learn")}
    result |= {"memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "start": time.perf_counter() - STARTED - sum(step["step"] for step in steps)}
    print("\nresult " + json.dumps(result), flush=True)


def measure(arm: str, scenario: str, beta: float) -> dict:
    """One run in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, __file__, f"--arm={arm}", scenario, f"--beta={beta}"], cwd=ROOT, capture_output=True, text=True, timeout=1800, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not lines:
        sys.exit(f"error: {arm} {scenario} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("result "))


def compare(scenario: str, beta: float, repeats: int) -> str:
    """One row of the table."""
    pairs = []
    for i in range(repeats):
        order = ("ours", "trl") if i % 2 == 0 else ("trl", "ours")
        found = {arm: measure(arm, scenario, beta) for arm in order}
        pairs.append(found)
        print(f"{scenario} {i + 1}/{repeats}: " + ", ".join(f"{arm} {one['step']:.3f} s a step, {one['memory']:.2f} GiB" for arm, one in found.items()), flush=True)
    cells = [scenario, f"{beta}"]
    for name in ("step", "learn", "memory", "start"):
        ratios = [pair["ours"][name] / pair["trl"][name] for pair in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4) if repeats > 1 else ratios * 3
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    return "| " + " | ".join(cells) + " |"


def main(argv: list[str]) -> None:
    flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in argv if flag.startswith("--"))
    scenarios, beta = [name for name in argv if not name.startswith("--")] or SCENARIOS, float(flags.get("beta", 0.0))
    if "arm" in flags:
        return run_arm(flags["arm"], scenarios[0], beta)
    oracle = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/test_trl_oracle.py", "-k", "dr_grpo"], cwd=ROOT, capture_output=True, text=True)
    print("the same loss on the same batch (tests/test_trl_oracle.py):", oracle.stdout.strip().splitlines()[-1], flush=True)
    if oracle.returncode:
        sys.exit(oracle.stdout)
    rows = [compare(scenario, beta, int(flags.get("repeats", 5))) for scenario in scenarios]
    print("\nours / TRL, median (quartiles):\n")
    print("| scenario | β | seconds a step | learning phase | peak memory | start to first step |", "|---" * 6 + "|", *rows, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
