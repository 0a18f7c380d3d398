"""Arms of `python -m bench` that run TRL's GRPOTrainer with settings that correspond to ours. They
take and return the same as the arms of bench/arms.py. tests/test_bench_trl.py compares all settings
of both, also those that are left at their defaults, because TRL's defaults change.
"""

import os
import tempfile
import time
from functools import partial

from bench.arms import CACHE, tokens_of_ours
from bench.scenarios import LONGEST_PROMPT, ends, has_tail, parts, prepare, read_rows, reward


def trl(scenario: str, beta: float, steps: int, **changes) -> tuple:
    """TRL's GRPOTrainer with transformers generation."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not changes.get("use_vllm"):
        hide_vllm_from_trl()
    from trl import GRPOConfig, GRPOTrainer

    def rewards(completions, **columns):
        return [reward(text, "") for text in completions]

    folder = prepare(scenario)
    # as ours on a CPU, whatever type the folder has (SmolLM2's is bfloat16)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    clock = make_clock()
    with tempfile.TemporaryDirectory() as out:
        settings = settings_of_trl(scenario, beta, steps, rows_of_trl(scenario, lm))
        trainer = GRPOTrainer(
            model=lm,
            args=GRPOConfig(**settings | {"output_dir": out} | changes),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=rewards,
            train_dataset=Dataset.from_list(read_rows(folder)),
            callbacks=[clock],
        )
        # covers its rollouts and nothing else, with either engine
        trainer._generate = clock.timed(trainer._generate)
        trainer.train()
    return clock.first, clock.steps


# for every comparison's GRPOConfig: dr_grpo, and nothing saved or shown, as in ours
PLAIN_TRL = {
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "temperature": 1.0,
    "learning_rate": 1e-5,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


def hide_vllm_from_trl() -> None:
    """To call before TRL is imported, which would load an installed vLLM even if it is not used."""
    from trl import import_utils

    import_utils.is_vllm_available = lambda min_version=None: False


def rows_of_trl(scenario: str, lm) -> int:
    """Rows in TRL's micro-batch: a power of two, with no more tokens than ours has."""
    size = parts(scenario)
    longest = LONGEST_PROMPT + size["T"]
    tokens = tokens_of_ours(scenario, lm)
    rows = size["P"] * size["G"]
    while rows > 1 and rows * longest > tokens:
        rows //= 2
    return rows


def settings_of_trl(scenario: str, beta: float, steps: int, rows: int) -> dict:
    """The GRPOConfig that corresponds to settings_of_ours(), with `rows` rows in a micro-batch."""
    size = parts(scenario)
    if has_tail(scenario):
        generation = {"eos_token_id": ends(scenario)}
    else:
        generation = {"min_new_tokens": size["T"]}
    return PLAIN_TRL | {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": size["P"] * size["G"] // rows,  # one update of all
        "num_generations": size["G"],
        "max_completion_length": size["T"],
        "generation_kwargs": generation,
        "beta": beta,
        "max_steps": steps,
        "use_cpu": True,
        "bf16": False,  # no autocast: float32, as ours
        "gradient_checkpointing": False,
    }


def make_clock():
    """A callback for a Trainer, with .first and .steps as an arm returns them."""
    from transformers import TrainerCallback  # here: takes seconds to import

    class Clock(TrainerCallback):
        def __init__(self):
            self.first = None
            self.steps = []

        def on_step_begin(self, *args, **kwargs):
            self.begin = time.perf_counter()
            self.generating = 0.0
            if self.first is None:
                self.first = self.begin

        def on_step_end(self, *args, **kwargs):
            step = time.perf_counter() - self.begin
            learn = step - self.generating  # all that is not rollout
            self.steps.append({"step": step, "learn": learn, "rollout": self.generating})

        def timed(self, generate):
            def generate_timed(*args, **kwargs):
                begin = time.perf_counter()
                try:
                    return generate(*args, **kwargs)
                finally:
                    self.generating += time.perf_counter() - begin

            return generate_timed

    return Clock()


def trl_vllm(scenario: str, beta: float, steps: int) -> tuple:
    """trl() with vLLM in process, in float32 like ours. TRL's own sync of weights fails on vLLM's
    CPU build, so ours replaces it; it counts as generation."""
    prepare_vllm_of_trl()
    if has_tail(scenario):
        generation = {"stop_token_ids": ends(scenario)}
    else:
        generation = {"ignore_eos": True}
    changes = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": LONGEST_PROMPT + parts(scenario)["T"],
        "generation_kwargs": generation,  # in place of transformers' own
    }
    return trl(scenario, beta, steps, **changes)


def prepare_vllm_of_trl() -> None:
    """Gives TRL a sync that works on a CPU, and float32: TRL leaves the type to vLLM, which takes
    bfloat16. To call before TRL is imported, because vLLM reads the environment once."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # in process, as ours is
        VLLM_CPU_KVCACHE_SPACE=str(CACHE),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    # imported only now, see above
    from trl.generation import vllm_generation

    from policy import named_weights

    def sync(self):
        weights = named_weights(self.model, 0)  # ZeRO stage 0: whole tensors
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()

    vllm_generation.VLLMGeneration.sync_weights = sync
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32")
