"""rollout_engine="server" with real vLLM CPU servers, which are killed and come back, and whole
runs of train.py with them."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from copy import deepcopy
from pathlib import Path

import child
import httpx
import pytest
import torch
from deadlines import PATIENCE
from engine_worker import PROMPTS, difference, perturb, sampling
from servers import (
    ROOT,
    Fleet,
    bare,
    environment,
    finish,
    make_engine,
    request,
    steps_in,
    train,
    words_of,
)
from stand_ins import FakeWorld, Proxy, StandIn
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint
import rollout
from policy import Policy, named_weights
from server import engine as server_engine

pytest_plugins = ["server_fixtures"]


@pytest.fixture(scope="module")
def fleet(tiny_model_dir, untied_model_dir, tmp_path_factory):
    fleet = Fleet([tiny_model_dir, untied_model_dir], tmp_path_factory.mktemp("servers"))
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def survivor(fleet, tiny_model_dir, tmp_path_factory):
    """An engine on both servers that outlives the death of one."""
    folder = tmp_path_factory.mktemp("survivor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_engine, "dist", FakeWorld(1))
        urls = fleet.ready(0, 1)
        engine = make_engine(tiny_model_dir, urls, folder, max_completion_length=48)
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def by_servers(survivor, tiny_model_dir):
    """Rollouts under two sets of weights, each with the difference from the trainer's log-probs;
    in the end that from weights which were not sent."""
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    found = []
    differences = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_engine, "dist", FakeWorld(1))
        for i in range(2):
            perturb(lm, i)
            survivor.sync(named_weights(lm, 0))
            rollouts = rollout.generate(survivor, tokenizer, PROMPTS, 8, sampling(i, 3))
            differences.append(difference(lm, rollouts))
            found += rollouts
    perturb(lm, 9)
    return found, differences, difference(lm, rollouts)


def test_log_probs_of_servers_are_those_of_the_trainer(by_servers, survivor):
    _, differences, of_other_weights = by_servers
    assert max(differences) < 2e-5
    assert survivor.take_metrics() == {
        "rollout/failed": 0,
        "rollout/foreign": 0,
        "rollout/refilled": 0,
        "rollout/servers": 2,
    }
    # the tolerance would notice weights that did not arrive
    assert of_other_weights > 2e-3


@pytest.mark.slow
def test_tokens_of_servers_are_those_of_the_engine_in_process(by_servers, tiny_model_dir):
    """The quick test of both is by the trainer's log-probs, above and in test_rollout.py."""
    found, *_ = by_servers
    worker = ROOT / "tests" / "helpers" / "server_worker.py"
    done = subprocess.run(
        [sys.executable, worker, tiny_model_dir],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(),
    )
    child.ended_well(done)
    in_process = sum(json.loads(done.stdout.splitlines()[-1]), [])  # noqa: RUF017
    assert bare(found) == bare(in_process)
    assert [r["text"] for r in found] == [r["text"] for r in in_process]
    for ours, theirs in zip(found, in_process):
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], rel=0, abs=2e-5)


def test_log_probs_of_an_untied_model_equal_the_trainers(fleet, world, make, untied_model_dir):
    lm = AutoModelForCausalLM.from_pretrained(untied_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(untied_model_dir)
    engine = make(fleet.ready(1), synced=False, model=untied_model_dir)
    for i in range(2):
        perturb(lm, i)
        engine.sync(named_weights(lm, 0))
        rollouts = rollout.generate(engine, tokenizer, PROMPTS, 8, sampling(i, 3))
        assert difference(lm, rollouts) < 2e-5


def test_a_server_killed_in_mid_request_is_left_out_and_the_groups_come_complete_from_the_other(
    survivor, fleet, world, lm, capsys, monkeypatch
):
    """It is stopped first, so that it certainly has requests that it did not answer when it is
    killed."""
    survivor.sync(named_weights(lm, 0))
    prompts = [[7, 20 + i] for i in range(8)]
    sampling = request(8)._replace(max_tokens=40)
    before = survivor.generate(prompts, 4, sampling)
    dying = survivor.servers[0]
    call = dying.call
    asked = threading.Event()

    def stopped(path, *args, **kwargs):
        if path == "/v1/completions":
            fleet.signal(0, signal.SIGSTOP)
            asked.set()
        return call(path, *args, **kwargs)

    monkeypatch.setattr(dying, "call", stopped)
    survivor.begin(prompts, 4, sampling, None)
    _, begun = survivor.ahead
    assert asked.wait(120)
    time.sleep(0.5)
    monkeypatch.setattr(dying, "call", call)
    assert not begun.done()
    fleet.signal(0, signal.SIGKILL)

    rollouts = survivor.generate(prompts, 4, sampling)
    assert [r["prompt_ids"] for r in rollouts] == [r["prompt_ids"] for r in before]
    assert difference(lm, rollouts) < 2e-5
    # those of the dead server were asked for again, with other seeds
    same = [bare(rollouts[i : i + 4]) == bare(before[i : i + 4]) for i in range(0, 32, 4)]
    assert same == [False, True] * 4
    counts = survivor.take_metrics()
    assert counts["rollout/failed"] >= 4
    assert counts["rollout/servers"] == 1
    assert "left out until the next sync" in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_that_was_started_again_is_used_again_after_a_sync(survivor, fleet, world, lm):
    fleet.ready(0, 1)
    survivor.sync(named_weights(lm, 0))
    fleet.signal(0, signal.SIGKILL)
    fleet.start(0)
    survivor.generate(PROMPTS, 8, sampling(2, 3))
    fleet.ready(0)
    assert [server.url for server in survivor.live] == [fleet.urls[1]]
    changed = deepcopy(lm)
    perturb(changed, 5)
    survivor.sync(named_weights(changed, 0))
    assert len(survivor.live) == 2
    assert difference(changed, survivor.generate(PROMPTS, 8, sampling(3, 3))) < 2e-5
    assert survivor.take_metrics()["rollout/servers"] == 2


@pytest.mark.slow
def test_a_server_is_left_out_when_somebody_else_changes_its_weights(survivor, fleet, world, lm):
    fleet.ready(0, 1)
    survivor.sync(named_weights(lm, 0))
    theirs = {"new_version": "theirs"}
    url = fleet.urls[0] + "/update_weight_version"
    httpx.post(url, json=theirs, timeout=PATIENCE, trust_env=False).raise_for_status()
    assert difference(lm, survivor.generate(PROMPTS, 8, sampling(4, 3))) < 2e-5
    assert [server.url for server in survivor.live] == [fleet.urls[1]]


# --- whole runs


@pytest.fixture(scope="module")
def ahead(fleet, tiny_model_dir, tmp_path_factory):
    """Three steps with rollout_ahead=1 on one rank, (folder, proxy): a proxy in front of the server
    has recorded them. Although old weights are wanted, the limit on their distance is low: here it
    is not looked at."""
    folder = tmp_path_factory.mktemp("ahead") / "run"
    proxy = Proxy(fleet.ready(1))
    flags = [
        "--rollout_engine=server",
        f"--rollout_server={proxy.url}",
        "--rollout_ahead=1",
        "--save_steps=1",
        "--save_total_limit=0",
    ]
    status, words = finish(train(tiny_model_dir, folder, *flags), folder)
    proxy.close()
    assert status == 0, words[-3000:]
    return folder, proxy


def test_a_run_asks_under_its_own_ids_and_tag(ahead):
    _, proxy = ahead
    names = []
    steps = []  # those that are asked for between a sync and the next
    for path, body, headers in proxy.log:
        if path == "/collective_rpc":
            steps.append([])
        if path != "/v1/completions" or "-trial-" in headers["X-Request-Id"]:
            continue
        names.append(headers["X-Request-Id"])
        steps[-1].append(int(re.search(r"-s(\d)-", names[-1])[1]))
        assert headers["X-VLLM-Client-Tag"] == "rank-0-of-1"
        assert all(type(token) is int for token in body["prompt"])
    wanted = [f"rank-0-of-1-s{step}-p{i}" for step in (1, 2, 3) for i in range(8)]
    assert sorted(names) == wanted
    # the trial's changed weights, then steps 1 and 2 by the first ones
    assert steps == [[], [1] * 8 + [2] * 8, [3] * 8, [], []]


def sent_in_step(proxy: Proxy, step: int) -> list[dict]:
    """The completions that have come through a proxy, as rollouts without text."""
    rollouts = []
    for name, answer in proxy.answers.items():
        if f"-s{step}-" not in name:
            continue
        for choice in json.loads(answer)["choices"]:
            rollouts.append(
                {
                    "prompt_ids": choice["prompt_token_ids"],
                    "completion_ids": choice["token_ids"],
                    "logprobs": choice["logprobs"]["token_logprobs"],
                }
            )
    return rollouts


@torch.no_grad()
def test_rollouts_made_ahead_are_by_weights_exactly_one_step_old(ahead, tiny_model_dir):
    """The log-probs that the server sent are those of the policy after one step less, and of no
    other."""
    folder, proxy = ahead
    policies = []
    for path in (tiny_model_dir, folder / "step_000001", folder / "step_000002"):
        policies.append(Policy(AutoModelForCausalLM.from_pretrained(path), 1.0, 64))
    for step, sampler in ((1, 0), (2, 0), (3, 1)):
        rollouts = sent_in_step(proxy, step)
        assert len(rollouts) == 32
        batch = rollout.to_batch(rollouts, "cpu")
        for i, policy in enumerate(policies):
            logps, _ = policy(batch["ids"], batch["prompt_lengths"], batch["lengths"])
            worst = (logps - batch["sampler_logps"]).abs().max().item()
            assert worst < 2e-5 if i == sampler else worst > 1e-3, (step, i, worst)


@pytest.fixture(scope="module")
def on_policy(fleet, tiny_model_dir, tmp_path_factory) -> Path:
    """Three steps on two ranks and two servers, ZeRO 2."""
    folder = tmp_path_factory.mktemp("on_policy") / "run"
    servers = ["--rollout_engine=server", f"--rollout_server={fleet.ready(0, 1)}"]
    process = train(tiny_model_dir, folder, *servers, "--zero_stage=2", ranks=2)
    status, words = finish(process, folder)
    assert status == 0, words[-3000:]
    return folder


# of a run's metrics, those that depend on the engine
OF_THE_ENGINE = ("time/", "mismatch", "sampling", "logp", "tokens_per_second")


@pytest.mark.slow
def test_a_run_by_two_servers_is_the_run_by_the_engine_in_process(
    on_policy, tiny_model_dir, tmp_path
):
    """Rewards and lengths to the digit: the same tokens; what depends on log-probs to the rounding
    of other batches in vLLM."""
    folder = tmp_path / "run"
    process = train(tiny_model_dir, folder, "--zero_stage=2", ranks=2)
    status, words = finish(process, folder)
    assert status == 0, words[-3000:]
    for by_servers, in_process in zip(steps_in(on_policy), steps_in(folder), strict=True):
        assert by_servers["rollout/servers"] == 2
        for key, value in in_process.items():
            if not key.startswith(OF_THE_ENGINE):
                assert by_servers[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
        for key in ("reward", "completions/mean_length"):
            assert by_servers[key] == in_process[key]
    assert not (on_policy / "weights").exists()


@pytest.mark.slow
def test_the_first_step_of_a_run_ahead_is_that_of_a_run_on_policy(ahead, on_policy):
    one = steps_in(ahead[0])[0]
    other = steps_in(on_policy)[0]
    for key in ("reward", "completions/mean_length"):
        assert one[key] == other[key]
    for key in ("loss", "grad_norm", "entropy"):
        assert one[key] == pytest.approx(other[key], rel=1e-3)


@pytest.mark.slow
def test_a_run_whose_servers_all_die_saves_and_exits_with_a_sentence_and_goes_on_with_others(
    fleet, tiny_model_dir, tmp_path
):
    folder = tmp_path / "run"
    flags = [
        "--rollout_engine=server",
        f"--rollout_server={fleet.ready(0, 1)}",
        "--max_logp_difference=-1",
        "--save_steps=0",
    ]
    process = train(tiny_model_dir, folder, *flags, "--max_steps=400")
    end = time.monotonic() + PATIENCE
    while len(steps_in(folder)) < 2:
        words = words_of(folder).read_text()[-3000:]
        assert time.monotonic() < end, words
        assert process.poll() is None, words
        time.sleep(0.05)
    fleet.signal(0, signal.SIGKILL)
    fleet.signal(1, signal.SIGKILL)
    status, words = finish(process, folder)
    assert status == 1, words[-3000:]
    (error,) = re.findall("error: .*", words)
    assert "no rollout server is left" in error
    assert "Traceback" not in words
    last = checkpoint.latest(folder)
    assert checkpoint.verify(last) == ""
    assert str(last) in words
    step = int(last.name.removeprefix("step_"))
    assert step == len(steps_in(folder)) >= 2

    others = [StandIn(port) for port in fleet.ports]
    goes_on = [f"--max_steps={step + 1}", "--resume_from_checkpoint=latest"]
    status, words = finish(train(tiny_model_dir, folder, *flags, *goes_on), folder)
    for each in others:
        each.close()
    assert status == 0, words[-3000:]
    assert [line["step"] for line in steps_in(folder)] == list(range(1, step + 2))
