"""What train.py itself decides: which metric steers, which model follows a schedule, what an
evaluation that fails costs; what a run is made of, and what it takes over where it goes on."""

import json
import math
import re
import shutil
from types import SimpleNamespace

import in_child
import pytest
import torch
from controlled import setting
from exact_matrix import steps_in
from test_balance import collected_by
from transformers import AutoConfig

import common
import controllers
import evaluate
import loss
import train
from journal import Timer
from prompts import answers_hash, prompts_hash
from ranks import World


def test_the_loop_steers_by_the_metrics_whose_targets_are_on():
    c = setting("tau_excess", kl_target=0.5, beta=0.2)
    run = SimpleNamespace(config=c, controller_state=controllers.init_state(c))
    measured = {"weights/entropy": 9.0, "weights/excess_entropy": 0.1, "kl": 2.0}
    told = train.steer(run, measured, None, None, None)
    assert run.controller_state["entropy"] == 0.1
    assert run.controller_state["tau"] > 0.2 == told["tau"]
    assert run.controller_state["beta"] > 0.2 == told["beta"]
    assert told["delta_tau"] == run.controller_state["tau"] - 0.2


# at this rate nothing is learnt: policy and reference stay the same model
FLAGS = {"beta": 0.1, "temperature": {0: 1.0, 1: 0.5}, "learning_rate": 1e-12, "save_steps": 0}


@pytest.fixture(scope="module")
def two_steps(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("loop") / "run"
    status, words = in_child.run(None, tiny_model_dir, folder, **FLAGS, max_steps=2, maxent_tau=0.2)
    assert status == 0, words
    return folder


def test_the_reference_follows_a_temperature_that_changes(two_steps):
    assert [line["kl"] < 1e-5 for line in steps_in(two_steps)] == [True, True]


def test_a_run_goes_on_with_a_new_tau_and_its_count_of_steps_that_taught_nothing(
    two_steps, tiny_model_dir, tmp_path
):
    """This model's answers are all wrong."""
    folder = shutil.copytree(two_steps, tmp_path / "run")
    flags = FLAGS | {"max_steps": 5, "maxent_tau": 0.05, "resume_from_checkpoint": "latest"}
    status, words = in_child.run(None, tiny_model_dir, folder, **flags)
    assert status == 0, words
    assert [line["tau"] for line in steps_in(folder)] == [0.2, 0.2, 0.05, 0.05, 0.05]
    assert "warning: for 5 steps all completions of a group have had equal rewards" in words


@pytest.mark.parametrize("ahead, skipped, limit", [(0, 0, 0.07), (1, 0, -1), (0, 1, -1)])
def test_a_sampler_may_be_further_off_if_it_is_a_step_behind_or_the_update_was_none(
    ahead, skipped, limit, monkeypatch
):
    class Measured(Exception):
        """Ends the step where sampler and trainer are compared."""

    def sampler_mismatch(batch, limit):
        raise Measured(limit, len(batch["ids"]))

    world = World(0, 1, torch.device("cpu"))
    run = SimpleNamespace(world=world, step=0, stopping=False, timer=Timer(), reference=None)
    run.config = common.load_config(["--max_logp_difference=0.07"]) | {"rollout_ahead": ahead}
    run.experience = SimpleNamespace(collect=lambda step, timer: collected_by(world))
    run.engine = SimpleNamespace(module=SimpleNamespace(lm=torch.nn.Module()))
    run.controller_state, run.skipped_steps = {"tau": 0.1, "beta": 0.0}, skipped
    for name in ("prove_sync", "catch_up"):
        monkeypatch.setattr(train, name, lambda run: None)
    monkeypatch.setattr(train, "update", lambda *args: {})
    monkeypatch.setattr(train.learner, "gather_rows", torch.Tensor.float)
    monkeypatch.setattr(train.learner, "sampler_mismatch", sampler_mismatch)
    with pytest.raises(Measured) as measured:
        train.train(run)
    assert measured.value.args == (limit, 8)  # half of the rows have a seed


def with_k_told() -> None:
    real = loss.ADVANTAGES["pass_at_k"]

    def told(rewards, scale, k):
        print(f"advantages of k={k!r}", flush=True)
        return real(rewards, scale, k)

    loss.ADVANTAGES["pass_at_k"] = told


def test_pkpo_takes_the_whole_k_of_each_step(tiny_model_dir, tmp_path):
    flags = {"objective": "pkpo", "pkpo_k": {0: 4, 2: 2}, "max_steps": 3}
    status, words = in_child.run(with_k_told, tiny_model_dir, tmp_path / "run", **flags)
    assert status == 0, words
    trial, *of_steps = re.findall(r"advantages of k=(\S+)", words)
    assert (trial, of_steps) == ("4", ["4", "3", "2"])


def test_an_evaluation_whose_servers_are_lost_is_said_and_ends_nothing(monkeypatch):
    def lost(*args):
        raise common.RolloutsLost("no server is left")

    monkeypatch.setattr(evaluate, "evaluate", lost)
    said = []
    run = SimpleNamespace(inputs=SimpleNamespace(eval_rows=[{}]), timer=Timer(), step=3)
    run.sampler = run.config = run.world = run.log = None
    run.say = said.append
    train.evaluate_now(run)
    assert said == ["step 3: not evaluated: no server is left"]


def test_the_seed_of_a_run_decides_where_its_adapters_and_its_seed_head_begin(
    tiny_model_dir, tmp_path, monkeypatch
):
    class Loaded(Exception):
        """Carries the policy out of start()."""

    def initialize(model, **settings):
        raise Loaded(model)

    def begun(seed: int) -> list:
        """What is trained of a new run's policy."""
        flags = ["--lora_rank=2", "--info_seed_num_seeds=2", "--info_seed_loss_type=ce"]
        flags += [f"--model={tiny_model_dir}", f"--output_dir={tmp_path / 'run'}", f"--seed={seed}"]
        with pytest.raises(Loaded) as loaded:
            train.start(common.load_config(flags))
        return [p for p in loaded.value.args[0].parameters() if p.requires_grad]

    inputs = SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=101), prompts_hash="", answers_hash=""
    )
    inputs.eval_rows = []
    monkeypatch.setattr(train, "load_inputs", lambda c, ranks: inputs)
    asleep = SimpleNamespace(sleep=lambda: None)
    monkeypatch.setattr(train.rollout, "start_engine", lambda c, device: asleep)
    monkeypatch.setattr(train.deepspeed, "initialize", initialize)
    one, same, other = begun(1), begun(1), begun(2)
    assert all(map(torch.equal, one, same))
    # the first adapter's A, the head's weights
    assert not torch.equal(one[0], other[0]) and not torch.equal(one[-2], other[-2])


def test_deepspeed_starts_once_all_ranks_have_loaded_their_model(monkeypatch):
    """On GPUs its first collective waits ten minutes, less than a slow disk may take on one node
    only; our barrier waits three hours."""
    done = []
    model = torch.nn.Linear(1, 1)

    def load_lm(*args, **kwargs):
        done.append("load")
        return model

    def initialize(**kwargs):
        done.append("deepspeed")
        return SimpleNamespace(optimizer=None, eval=lambda: None), None

    monkeypatch.setattr(train, "load_lm", load_lm)
    monkeypatch.setattr(train, "make_optimizer", lambda parameters, c: None)
    monkeypatch.setattr(train, "skip_by_norm", lambda optimizer, c: None)
    monkeypatch.setattr(train.dist, "barrier", lambda: done.append("meet"))
    monkeypatch.setattr(train.deepspeed, "initialize", initialize)
    c = common.load_config(["--beta=0.1", "--reference_placement=sharded"])
    train.load_reference(c, train.load_policy(c, "cpu"), "cpu")
    assert done == 2 * ["load", "meet", "deepspeed"]


@pytest.mark.parametrize("stop_ids, saved", [([0], 0), ([0, 7], [0, 7])])
def test_checkpoints_are_to_stop_at_the_tokens_of_the_run(stop_ids, saved, tmp_path, monkeypatch):
    class Loaded(Exception):
        pass

    def load_reference(*given):
        raise Loaded

    lm = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[0, 16]))
    inputs = SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=101),
        stop_ids=stop_ids,
        eval_rows=[],
        prompts_hash="",
        answers_hash="",
    )
    asleep = SimpleNamespace(sleep=lambda: None)
    monkeypatch.setattr(train, "load_inputs", lambda c, ranks: inputs)
    monkeypatch.setattr(train.rollout, "start_engine", lambda c, device: asleep)
    engine = SimpleNamespace(module=SimpleNamespace(lm=lm))
    monkeypatch.setattr(train, "load_policy", lambda c, device: engine)
    monkeypatch.setattr(train, "load_reference", load_reference)
    asked = []
    monkeypatch.setattr(train.rollout, "check_class_unchanged", lambda *args: asked.append(args))
    monkeypatch.setattr(train, "share_cores", lambda *args: asked.append(args))
    c = common.load_config(["--model=any", f"--output_dir={tmp_path / 'run'}"])
    with pytest.raises(Loaded):
        train.start(c)
    assert lm.generation_config.eos_token_id == saved
    # on the way: is the class still transformers', and how many cores has an optimizer?
    assert [first for first, *_ in asked] == [asleep, c | {"maxent_tau": asked[0][1]["maxent_tau"]}]


def test_a_schedule_without_a_formula_fails_before_anything_loads(monkeypatch, tmp_path):
    for name in ("load_inputs", "dry_run"):
        monkeypatch.setattr(train, name, lambda *args: pytest.fail("it goes on"))
    c = common.load_config(["--model=any", f"--output_dir={tmp_path / 'run'}"])
    for begin in (train.start, train.dry_run_main):
        with pytest.raises(ValueError, match="no lr_scheduler_type='inverse_sqrt'"):
            begin(c | {"lr_scheduler_type": "inverse_sqrt"})
    monkeypatch.setenv("RANK", "1")
    train.dry_run_main(c)  # rank 0 speaks for all


def test_a_policy_is_padded_and_recomputed_as_the_config_says(tiny_model_dir):
    for value in (True, False):
        flags = [f"--pack_sequences={value}", f"--gradient_checkpointing={value}"]
        c = common.load_config([f"--model={tiny_model_dir}", *flags])
        policy = train.load_lm(c, trains=True, device="cpu")
        assert policy.pack == value
        assert policy.lm.is_gradient_checkpointing == value


def test_a_rank_without_a_log_owes_the_evaluation_that_rank_0_owes(monkeypatch):
    c = {"eval_steps": 2, "max_steps": 9}
    asked = []
    monkeypatch.setattr(train, "any_rank", lambda own: asked.append(own) or True)
    assert train.owes_evaluation(SimpleNamespace(step=4, config=c, log=None, folder=None))
    assert asked == [False]
    assert not train.owes_evaluation(SimpleNamespace(step=5, config=c, log=None, folder=None))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_alone_starts_the_eval_command(rank, monkeypatch):
    started = []
    monkeypatch.setattr(train.checkpoint, "save", lambda *args: "step_000004")
    monkeypatch.setattr(evaluate, "start_command", lambda *args: started.append(args))
    run = SimpleNamespace(step=4, saved_step=0, skipped_steps=0, timer=Timer())
    run.symptoms = SimpleNamespace(equal_steps=0)
    run.config = {"save_steps": 1, "eval_command": "ls {checkpoint}", "max_steps": 9}
    run.experience = SimpleNamespace(replay_state={})
    run.inputs = SimpleNamespace(tokenizer=None, prompts_hash="", answers_hash="", trained=set())
    run.world = SimpleNamespace(rank=rank)
    run.controller_state = run.engine = None
    pushed = []
    hub = SimpleNamespace(push=lambda path, last: pushed.append(last))
    run.hub = hub if rank == 0 else None
    run.say = lambda sentence: None
    train.save_now(run)
    train.save_now(run)  # it is saved already
    assert started == ([("ls {checkpoint}", "step_000004")] if rank == 0 else [])
    run.step = 9
    train.save_now(run)
    assert pushed == ([False, True] if rank == 0 else [])


def test_a_start_looks_whether_the_checkpoint_is_of_its_model(
    tiny_model_dir, tmp_path, monkeypatch
):
    path = tmp_path / "step_000001"
    path.mkdir()
    wider = {"model_type": "qwen2", "hidden_size": 999, "vocab_size": 101}
    (path / "config.json").write_text(json.dumps(wider))
    model_config = AutoConfig.from_pretrained(tiny_model_dir)
    monkeypatch.setattr(
        train,
        "load_inputs",
        lambda c, ranks: SimpleNamespace(
            model_config=model_config,
            prompts_hash="x",
            answers_hash="y",
            eval_rows=[{"prompt_ids": [1], "answer": "2"}],
        ),
    )
    monkeypatch.setattr(train.checkpoint, "find", lambda c: path)
    monkeypatch.setattr(train.rollout, "start_engine", lambda *args: pytest.fail("it goes on"))
    told = []
    monkeypatch.setattr(train, "check_alike", told.append)
    c = common.load_config([f"--model={tiny_model_dir}", f"--output_dir={tmp_path / 'run'}"])
    with pytest.raises(common.UserError, match="hidden_size=999"):
        train.start(c)
    # the ranks had compared before what they were started with
    hashes = {
        "hash of the training prompts": "x",
        "hash of the evaluation prompts": prompts_hash([{"prompt_ids": [1]}]),
        "hash of the training answers": "y",
        "hash of the evaluation answers": answers_hash([{"answer": "2"}]),
    }
    assert told == [c | {"maxent_tau": 1 / math.log(101)} | hashes]


@pytest.mark.parametrize("stopping", [False, True])
def test_a_run_that_a_signal_stopped_leaves_the_file_that_the_batch_script_looks_for(
    stopping, tmp_path, monkeypatch
):
    monkeypatch.setattr(train.evaluate, "report", lambda folder: None)
    monkeypatch.setattr(train, "leave_together", lambda sampler: None)
    run = SimpleNamespace(config=common.load_config(["--max_steps=9"]), step=3, stopping=stopping)
    waited = []
    hub = SimpleNamespace(finish=lambda: waited.append("for the last upload"))
    vars(run).update(folder=tmp_path, say=print, sampler=None, hub=hub)
    run.log = SimpleNamespace(close=lambda: None)
    train.finish(run)
    assert bool(waited) != stopping  # it may soon be killed
    assert (tmp_path / "stop").exists() == stopping
    assert not (tmp_path / "done").exists()
