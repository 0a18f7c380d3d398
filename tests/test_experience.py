"""experience.collect with a fake engine, alone and on several ranks: threads stand in for ranks,
once real processes with gloo."""

import copy
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import child
import in_child
import pytest
import torch
import torch.distributed as dist
from deadlines import PATIENCE
from digit_engine import (
    FAKE_REWARD,
    TOKENIZER,
    FakeEngine,
    fake_reward,
    rows_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import experience
import rollout
import scoring
import sft
import stream
import train
from common import RunStopped, load_config
from journal import Timer
from learner import GroupTargets
from policy import Policy, set_temperature
from preflight import Inputs
from ranks import World
from stream import Replay, prompt_key

P = 8
G = 4
S = 2
COMMON = [
    f"--prompts_per_step={P}",
    f"--num_generations={G}",
    "--max_completion_length=9",
    "--reward_funcs=['fake']",
    "--reward_workers=0",
]
INFOSEED = [
    f"--info_seed_num_seeds={S}",
    "--info_seed_prompt_template={prompt} #{seed}",
]


def inputs_of(*sources, weights=None, easy=()) -> Inputs:
    return Inputs(
        None,
        TOKENIZER,
        [0],
        list(sources),
        weights or [1.0] * len(sources),
        list(easy),
        [FAKE_REWARD],  # by hand: REWARDS has no fake one
        [],
        "",
        "",
        set(),
    )


COLLECTED = experience.Collected._fields
MIXED = inputs_of(rows_of(*["same", "differ", "luck", "luck"] * 25))


def config(*flags) -> dict:
    return load_config([*COMMON, *flags])


def collect(
    c: dict, step: int = 0, inputs=MIXED, world: int = 1, size: int = 0, state=None
) -> list[SimpleNamespace]:
    """What every rank has afterwards, `world` threads as ranks: .prompts, .rollouts,
    .rewards_per_func, .rewards, .metrics, .engine, .buffer. size: of a replay buffer for each. A
    rank that meets the others at another point than they do is a BrokenBarrierError."""
    barrier = threading.Barrier(world, timeout=PATIENCE)
    parts = {}
    me = threading.local()

    def gather_rows(tensor):
        parts[me.rank] = tensor.float()
        barrier.wait()
        whole = torch.cat([parts[rank] for rank in range(world)])
        barrier.wait()
        return whole

    def one(rank: int) -> SimpleNamespace:
        me.rank = rank
        engine = FakeEngine()
        settings = c | {"replay": c["replay"] | {"size": size}}
        place = World(rank, world, torch.device("cpu"))
        source = experience.Experience(engine, inputs, settings, place, state or {})
        try:
            got = source.collect(step, Timer())._asdict()
        except BaseException as error:
            got = {"error": error}
        return SimpleNamespace(**got, engine=engine, buffer=source.replay)

    real = experience.gather_rows, experience.wait_for_ranks
    experience.gather_rows = gather_rows
    experience.wait_for_ranks = lambda timer: barrier.wait()
    try:
        with ThreadPoolExecutor(world) as threads:
            ranks = list(threads.map(one, range(world)))
    finally:
        experience.gather_rows, experience.wait_for_ranks = real
    errors = [rank.error for rank in ranks if hasattr(rank, "error")]
    if errors:
        # all stop alike, or something is wrong
        assert len(errors) == world, errors
        assert len(set(map(str, errors))) == 1, errors
        raise errors[0]
    return ranks


def ids(rows: list[dict]) -> list[str]:
    return [row["id"] for row in rows]


def prompts_in_line(got, size: int) -> bool:
    """Whether each row's `size` completions stand behind each other."""
    wanted = []
    for row in got.prompts:
        wanted += [row["prompt_ids"]] * size
    return [r["prompt_ids"] for r in got.rollouts] == wanted


def rewards_in_line(got, size: int) -> bool:
    """Whether every completion has its own reward."""
    wanted = []
    for i, row in enumerate(got.prompts):
        group = got.rollouts[i * size : (i + 1) * size]
        wanted.append([fake_reward(r["text"], row["answer"]) for r in group])
    return got.rewards.tolist() == wanted


# --- one step


def test_a_step_is_its_prompts_with_seeds_of_their_own_and_everything_stays_in_line():
    c = config()
    (got,) = collect(c, step=3)
    assert got.prompts == stream.prompts_for_step(MIXED.pools, [1.0], 3, P, 42)
    assert prompts_in_line(got, G)
    assert rewards_in_line(got, G)
    assert torch.equal(got.rewards_per_func[..., 0], got.rewards)
    assert "resampled_groups" not in got.metrics
    (call,) = got.engine.calls
    assert call["seeds"] == [rollout.prompt_seed(42, 3, i) for i in range(P)]
    assert got.engine.naps == 1
    assert call["n"] == G
    assert call["temperature"] == 1.0
    assert call["max_tokens"] == 9
    assert call["stop_token_ids"] == [0]


@pytest.mark.parametrize("flags", [[], INFOSEED])
@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_any_number_of_ranks_has_together_what_one_rank_has(world, limit, flags):
    step = world + limit
    c = config(f"--resample_equal_groups={limit}", "--replay.size=6", *flags)
    state = {
        "total": 9,
        "prompts": {prompt_key(row): [1, 0.5, 0.0] for row in MIXED.pools[0][:9]},
    }
    (whole,) = collect(c, step, size=6, state=state)
    ranks = collect(c, step, world=world, size=6, state=state)
    assert [row for rank in ranks for row in rank.prompts] == whole.prompts
    assert [r for rank in ranks for r in rank.rollouts] == whole.rollouts
    assert torch.equal(torch.cat([rank.rewards_per_func for rank in ranks]), whole.rewards_per_func)
    if world == 8 and limit:  # else the last line below would show nothing
        assert any(not call["prompts_ids"] for rank in ranks for call in rank.engine.calls)
    for i, rank in enumerate(ranks):
        assert len(rank.prompts) == P // world
        assert rank.prompts == whole.prompts[i * P // world : (i + 1) * P // world]
        assert torch.equal(rank.rewards, whole.rewards) and rank.metrics == whole.metrics
        assert rank.buffer.state == whole.buffer.state
        # ranks that share an engine ask it together: as often, with nothing to ask too
        asked = [call["n"] for call in rank.engine.calls]
        assert asked == [call["n"] for call in whole.engine.calls]


# --- groups that taught nothing


@settings(max_examples=15)
@given(st.integers(0, 99).filter(lambda step: step != 43), st.integers(1, 3))
def test_only_groups_without_spread_are_sampled_again_and_with_other_prompts(step, limit):
    (before,) = collect(config(), step)
    (got,) = collect(config(f"--resample_equal_groups={limit}"), step)
    stale = [len(set(group)) == 1 for group in before.rewards.tolist()]
    assert any(stale) and not all(stale)  # at step 43 no group is
    for i, old in enumerate(stale):
        group = slice(i * G, (i + 1) * G)
        same_rollouts = got.rollouts[group] == before.rollouts[group]
        assert (got.prompts[i] == before.prompts[i]) == same_rollouts == (not old)
    again = got.engine.calls[1]
    fresh = stream.prompts_for_step(MIXED.pools, [1.0], step, P, "42/again/1")
    places = [i for i, old in enumerate(stale) if old]
    assert again["prompts_ids"] == [fresh[i]["prompt_ids"] for i in places]
    assert again["seeds"] == [rollout.prompt_seed(42, step, i, 1) for i in places]
    assert not set(again["seeds"]) & set(got.engine.calls[0]["seeds"])
    assert not set(again["names"]) & set(got.engine.calls[0]["names"])
    # in line all the same, and counted: a call for every attempt, the last of which may still be
    # equal
    assert rewards_in_line(got, G)
    assert torch.equal(got.rewards_per_func[..., 0], got.rewards)
    assert prompts_in_line(got, G)
    resampled = sum(len(call["prompts_ids"]) for call in got.engine.calls[1:])
    assert got.metrics["resampled_groups"] == resampled
    assert got.metrics["reward/fake/mean"] == pytest.approx(got.rewards.mean().item())
    left = sum(len(set(group)) == 1 for group in got.rewards.tolist())
    assert len(got.engine.calls) == 1 + limit or left == 0


def test_sampling_again_stops_at_the_limit_or_when_nothing_is_left_to_replace():
    hopeless = inputs_of(rows_of(*["same"] * 40))
    fine = inputs_of(rows_of(*["differ"] * 40))
    mixed = inputs_of(rows_of(*["same"] * 3, *["differ"] * 3))
    (got,) = collect(config("--resample_equal_groups=3"), inputs=hopeless)
    assert len(got.engine.calls) == 4
    assert got.metrics["resampled_groups"] == 3 * P
    assert got.engine.naps == 1
    # each time other prompts
    assert len({tuple(map(tuple, call["prompts_ids"])) for call in got.engine.calls}) == 4
    (got,) = collect(config("--resample_equal_groups=3"), inputs=fine)
    assert len(got.engine.calls) == 1
    assert got.metrics["resampled_groups"] == 0
    (got,) = collect(config("--resample_equal_groups=50"), inputs=mixed)
    assert len(got.engine.calls) < 51
    assert all(len(set(group)) == 2 for group in got.rewards.tolist())


def test_sampling_again_is_deterministic_and_other_steps_take_other_prompts():
    c = config("--resample_equal_groups=2")
    first, second, other = (collect(c, step)[0] for step in (5, 5, 6))
    assert first.prompts == second.prompts
    assert first.rollouts == second.rollouts
    assert first.metrics == second.metrics
    assert first.engine.calls == second.engine.calls
    assert first.engine.calls[1] != other.engine.calls[1]


def test_spread_is_that_of_the_ordinary_completions_and_seed_rows_come_along():
    """The seed rows of "same" score 0 and its ordinary ones 1; those of "differ" are all alike."""
    rows = rows_of(*["same", "differ"] * 20)
    (got,) = collect(config("--resample_equal_groups=1", *INFOSEED), inputs=inputs_of(rows))
    first = got.engine.calls[0]
    stale = len(got.engine.calls[2]["prompts_ids"])
    answers = {tuple(row["prompt_ids"]): row["answer"] for row in rows}
    assert stale == sum(answers[tuple(prompt)] == "same" for prompt in first["prompts_ids"])
    assert 0 < stale < P
    assert [call["n"] for call in got.engine.calls] == [G, 1, G, 1]
    assert len(got.engine.calls[3]["prompts_ids"]) == stale * S
    assert [r.get("seed_id") for r in got.rollouts] == [None, None, None, None, 0, 1] * P
    assert got.rewards.shape == (P, G + S)
    assert prompts_in_line(got, G + S)
    assert rewards_in_line(got, G + S)


# --- where a step's prompts come from


def test_a_step_draws_from_mixture_easy_pool_and_buffer_and_replacements_from_the_mixture_only():
    easy = rows_of(*["same"] * 9, name="easy")
    inputs = inputs_of(
        rows_of(*["same"] * 60, name="a"),
        rows_of(*["same"] * 60, name="b"),
        weights=[3.0, 1.0],
        easy=easy,
    )
    c = config(
        "--easy_dataset.name=countdown",
        "--easy_dataset.share={1: 0.0, 2: 1.0, 3: 1.0, 4: 0.0}",
        "--replay.fraction=0.25",
        "--resample_equal_groups=2",
    )
    state = {"total": 9, "prompts": {prompt_key(row): [1, 0.5, 0.0] for row in inputs.pools[1]}}
    buffer = Replay(inputs.pools[0] + inputs.pools[1], 99, 0.5, state)
    plain = {
        step: stream.prompts_for_step(inputs.pools, [3.0, 1.0], step, P, 42) for step in range(5)
    }
    assert experience.step_rows(inputs, None, 1, c) == plain[1]
    assert experience.step_rows(inputs, None, 4, c) == plain[4]
    assert all(
        row in easy
        for row in experience.step_rows(inputs, None, 2, c)
        + experience.step_rows(inputs, None, 3, c)
    )
    of_its_seed = stream.with_easy_prompts(plain[2], easy, 2, 1.0, 42)
    assert experience.step_rows(inputs, None, 2, c) == of_its_seed
    with_buffer = experience.step_rows(inputs, buffer, 2, c)
    assert all(row in easy for row in with_buffer[:6])
    assert all(row in inputs.pools[1] for row in with_buffer[6:])
    for attempt in (1, 2):
        again = experience.step_rows(inputs, buffer, 2, c, attempt)
        assert again == stream.prompts_for_step(
            inputs.pools, [3.0, 1.0], 2, P, f"42/again/{attempt}"
        )


def test_the_buffer_learns_from_ordinary_rows_of_the_final_groups_and_of_those_that_were_replaced():
    inputs = inputs_of(rows_of(*["same", "differ"] * 30))
    (got,) = collect(
        config("--resample_equal_groups=1", "--replay.size=99", *INFOSEED), inputs=inputs, size=99
    )
    replaced = experience.step_rows(inputs, None, 0, config())
    first = [row for row in replaced if row["answer"] == "same"]
    seen = ids(got.prompts) + ids(first)
    assert got.buffer.state["total"] == len(seen)
    # the gap over G rows; over G + S it is another
    wanted = {row["id"]: 0.5 if row["answer"] == "differ" else 0.0 for row in got.prompts + first}
    remembered = {}
    for key, (_visits, mean, _) in got.buffer.state["prompts"].items():
        remembered[got.buffer.rows[key]["id"]] = mean
    assert remembered == wanted


def test_a_remembered_prompt_with_nothing_left_to_teach_is_let_go_also_when_sampled_again():
    inputs = inputs_of(rows_of(*["same"] + ["differ"] * 59))
    solved = prompt_key(inputs.pools[0][0])
    state = {"total": 20, "prompts": {prompt_key(inputs.pools[0][0]): [3, 0.75, 0.1]}}
    for limit in (0, 2):
        chosen, remembered = 0, state
        for step in range(20):
            (got,) = collect(
                config(
                    f"--resample_equal_groups={limit}",
                    "--replay.fraction=0.125",
                    "--replay.ucb=0.1",
                ),
                step,
                inputs,
                size=8,
                state=remembered,
            )
            remembered = got.buffer.state
            chosen += inputs.pools[0][0]["prompt_ids"] in got.engine.calls[0]["prompts_ids"]
        assert chosen <= 3 and (
            solved not in remembered["prompts"] or remembered["prompts"][solved][0] > 3
        ), (limit, chosen)


def test_collecting_leaves_rows_and_inputs_as_they_are():
    inputs = inputs_of(rows_of(*["same", "differ"] * 20))
    before = copy.deepcopy((inputs.pools, inputs.pool_weights, inputs.reward_functions))
    collect(config("--resample_equal_groups=2"), inputs=inputs, size=5, world=2)
    assert (inputs.pools, inputs.pool_weights, inputs.reward_functions) == before


@pytest.fixture
def alone(monkeypatch):
    """A rank without others: (engine, Experience) of these flags."""
    monkeypatch.setattr(experience, "gather_rows", torch.Tensor.float)
    monkeypatch.setattr(experience, "wait_for_ranks", lambda timer: None)

    def start(*flags) -> tuple:
        engine = FakeEngine()
        world = World(0, 1, torch.device("cpu"))
        return engine, experience.Experience(engine, MIXED, config(*flags), world, {})

    return start


def test_what_is_asked_a_step_ahead_is_what_the_next_step_asks_and_nothing_after_the_last(alone):
    """Otherwise the engine would drop what it has, and sample it again."""
    flags = ["--rollout_engine=server", "--rollout_server=http://a:1", "--rollout_ahead=1"]
    flags += ["--replay.size=9", "--replay.fraction=0.5", "--temperature={0: 1.0, 2: 0.5}"]
    engine, source = alone(*flags, "--max_steps=3")
    for step in range(3):
        source.collect(step, Timer())
    assert engine.begun == engine.calls[1:] and len(engine.begun) == 2


def test_the_buffers_size_and_bonus_are_the_configs(alone):
    _, source = alone("--replay.size=7", "--replay.ucb=0.25")
    assert (source.replay.size, source.replay.ucb) == (7, 0.25)


def test_a_line_of_logged_rollouts_is_a_completion_with_its_own_prompt_and_reward(tmp_path):
    (got,) = collect(config(*INFOSEED), step=1)
    collected = experience.Collected(**{name: getattr(got, name) for name in COLLECTED})
    p = len(got.prompts)
    rewards = torch.zeros(p, G + S)
    weights = torch.arange(p * (G + S)).view(p, -1) / 10
    targets = GroupTargets(rewards, rewards[:, 0] > 0, weights=weights, advantages=weights - 1)

    def logged(step: int, targets: GroupTargets) -> list[dict]:
        experience.log_rollouts(tmp_path, collected, targets, [FAKE_REWARD], step)
        text = (tmp_path / "rollouts" / f"step_{step:06d}.rank_0.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    lines = logged(2, targets)
    assert [line["completion"] for line in lines] == [r["text"] for r in got.rollouts]
    answers = {row["id"]: row["answer"] for row in MIXED.pools[0]}
    for i, line in enumerate(lines):
        assert line["id"] == got.prompts[i // (G + S)]["id"]
        assert line["reward"] == fake_reward(line["completion"], answers[line["id"]])
        assert line["correct"] == (line["reward"] >= 1)
        assert (line["tokens"], line["logprob"]) == (5, -5.0)
        assert line["weight"] == pytest.approx(i / 10)
        assert line["advantage"] == pytest.approx(i / 10 - 1)
        assert "goal" not in line  # this objective has none
    for i, line in enumerate(logged(3, GroupTargets(rewards, targets.active, goals=weights + 1))):
        assert line["goal"] == pytest.approx(i / 10 + 1)
        assert not {"weight", "advantage"} & set(line)


# --- rewards that fail


def test_failed_rewards_are_written_down_by_every_rank_and_stop_all_of_them_over_the_limit(
    tmp_path,
):
    inputs = inputs_of(rows_of(*["broken"] + ["differ"] * 7))  # one of the 8 prompts of every step
    c = config(f"--output_dir={tmp_path}", "--max_reward_failures=0.2")
    ranks = collect(c, 0, inputs, world=2)
    assert ranks[0].metrics["reward/fake/errors"] == 4 == ranks[1].metrics["reward/fake/errors"]
    (file,) = tmp_path.glob("reward_failures.rank_*.jsonl")
    saved = file.read_text().splitlines()
    assert len(saved) == G
    assert "no idea" in json.loads(saved[0])["reason"]
    assert json.loads(saved[0])["step"] == 1
    # a group that only failed is replaced; it counts all the same, and is in the file
    (got,) = collect(c | {"resample_equal_groups": 9}, 1, inputs)
    assert got.metrics["reward/fake/errors"] == got.metrics["reward/failures"] == 4
    assert "broken" not in [row["answer"] for row in got.prompts]
    failed = set()
    for path in tmp_path.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            failed.add((record["step"], record["id"]))
    assert failed == {(1, "q0"), (2, "q0")}
    with pytest.raises(RunStopped, match="rewards failed on 4 of a step's 32 completions"):
        collect(c | {"max_reward_failures": 0.1}, 0, inputs, world=2)
    all_broken = inputs_of(rows_of(*["broken"] * 8))
    assert collect(c | {"max_reward_failures": 1.0}, 0, all_broken, world=2)
    # a failure counts even if its group was replaced
    with pytest.raises(RunStopped, match="rewards failed on 4 of a step's 32 completions"):
        collect(c | {"resample_equal_groups": 9, "max_reward_failures": 0.1}, 1, inputs)


def test_a_step_says_how_many_timeouts_it_can_bear(monkeypatch):
    """More than a quarter of its 8 x 4 completions end it, whichever rank has them."""
    asked = []
    run_jobs = scoring.run_jobs

    def ask(jobs: dict, c: dict, max_timeouts: float) -> dict:
        asked.append(max_timeouts)
        return run_jobs(jobs, c)

    monkeypatch.setattr(scoring, "run_jobs", ask)
    collect(config("--max_reward_failures=0.25"), world=2)
    assert asked == [P * G / 4] * 2


# --- temperature


def test_a_temperature_schedule_reaches_every_request_to_the_engine():
    c = config(
        "--temperature={1: 0.9, 2: 1.3, 4: 1.3, 6: 0.6}",
        "--resample_equal_groups=1",
        *INFOSEED,
    )
    for step, temperature in ((0, 0.9), (1, 0.9), (2, 1.3), (4, 1.3), (6, 0.6), (99, 0.6)):
        (got,) = collect(c, step)
        assert [call["temperature"] for call in got.engine.calls] == [temperature] * 4
    assert collect(config("--temperature=0.9"), 7)[0].engine.calls[0]["temperature"] == 0.9


def test_the_policy_and_the_reference_take_log_probs_at_the_temperature_of_the_step():
    lm = sft.tiny_model(101, seed=1, layers=1, width=32)
    bare = Policy(lm, 1.0, 64)
    inside = Policy(lm, 1.0, 64)
    set_temperature((bare, SimpleNamespace(module=inside), None), 0.5)
    batch = [torch.tensor([[5, 6, 7, 8]]), torch.tensor([2]), torch.tensor([2])]
    wanted, _ = Policy(lm, 0.5, 64)(*batch)
    other, _ = Policy(lm, 1.0, 64)(*batch)
    assert torch.equal(bare(*batch)[0], wanted)
    assert torch.equal(inside(*batch)[0], wanted)
    assert not torch.allclose(wanted, other)


# --- real ranks, and the real script


def one_rank(rank: int, folder: Path, c: dict) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2
    )
    engine = FakeEngine()
    place = World(rank, 2, torch.device("cpu"))
    source = experience.Experience(
        engine, MIXED, c | {"replay": c["replay"] | {"size": 6}}, place, {}
    )
    steps = [source.collect(step, Timer())._asdict() for step in range(4)]
    result = {"steps": steps, "buffer": source.replay.state, "calls": len(engine.calls)}
    torch.save(result, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_with_gloo_agree_with_one(tmp_path):
    c = config("--resample_equal_groups=2")
    processes = [child.start(one_rank, rank, tmp_path, c) for rank in range(2)]
    assert [child.status(process) for process in processes] == [0, 0]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    state = {}
    for step in range(4):
        (whole,) = collect(c, step, size=6, state=state)
        state = whole.buffer.state
        parts = [rank["steps"][step] for rank in ranks]
        assert parts[0]["prompts"] + parts[1]["prompts"] == whole.prompts
        assert parts[0]["rollouts"] + parts[1]["rollouts"] == whole.rollouts
        for part in parts:
            assert torch.equal(part["rewards"], whole.rewards)
            assert part["metrics"] == whole.metrics
    assert ranks[0]["buffer"] == ranks[1]["buffer"] == state
    assert ranks[0]["calls"] == ranks[1]["calls"]


def without_a_picture() -> None:
    train.evaluate.report = lambda folder: None


def test_the_real_script_resumes_with_the_prompts_and_the_buffer_it_would_have_had(
    tiny_model_dir, tmp_path
):
    """Everything of this file at once: two sources, an easy pool, a buffer, sampling again, two
    temperatures. max_logp_difference stops the run if sampler and policy are not at the same
    one."""
    for name in "abe":
        rows = [{"prompt": f"{name} {i}", "answer": "1"} for i in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixture = [
        {"name": str(tmp_path / "a.jsonl"), "weight": 2},
        {"name": str(tmp_path / "b.jsonl")},
    ]
    argv = [
        f"--model={tiny_model_dir}",
        f"--dataset={mixture}",
        f"--easy_dataset.name={tmp_path / 'e.jsonl'}",
        "--easy_dataset.share={0: 0.5, 1: 0.5, 2: 0.25}",
        "--replay.size=5",
        "--replay.fraction=0.25",
        "--resample_equal_groups=2",
        "--temperature={1: 1.5, 2: 0.7}",
        "--reward_funcs=['length']",
        "--reward_workers=0",
        "--prompts_per_step=4",
        "--num_generations=3",
        "--max_completion_length=6",
        "--max_prompt_length=32",
        "--rollout_engine=hf",
        "--max_steps=3",
        "--save_steps=2",
        "--log_rollouts_steps=1",
        "--max_logp_difference=0.01",
        "--learning_rate=1e-3",
    ]
    whole, part = tmp_path / "whole", tmp_path / "part"
    log = tmp_path / "log"
    for folder, more in ((whole, []), (part, ["--resume_from_checkpoint=latest"])):
        words = [*argv, *more, f"--output_dir={folder}"]
        run = child.start(in_child.train_after, without_a_picture, words, log=log)
        assert child.status(run) == 0, log.read_text()[-3000:]
        if folder == whole:
            shutil.copytree(whole, part)
            shutil.rmtree(part / "step_000003")
    rollouts_file = "rollouts/step_000003.rank_0.jsonl"
    whole_rollouts = (whole / rollouts_file).read_text()
    assert (part / rollouts_file).read_text() == whole_rollouts
    state_file = "step_000003/controller_state.json"
    state = json.loads((part / state_file).read_text())
    assert state == json.loads((whole / state_file).read_text())
    assert len(state["replay"]["prompts"]) == 5
    assert state["replay"]["total"] >= 12
    text = (part / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all("resampled_groups" in line for line in lines)
