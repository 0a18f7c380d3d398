"""rollout_engine="server": what is asked for, of whom and when; servers that fail are left out and
come back; ranks agree; completions may be made a step ahead."""

import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import httpx
import pytest
from bad_answers import BAD
from deadlines import PATIENCE
from engine_worker import PROMPTS, sampling
from servers import any_weights, bare, dead_url, expected, request
from stand_ins import Proxy, together, usual
from transformers import AutoTokenizer

import infoseed
import workers
from common import RolloutsLost, RunStopped, UserError, load_config
from server import engine as server_engine

pytest_plugins = ["server_fixtures"]


def some_prompts(count: int) -> list[list[int]]:
    return [[i + 1] for i in range(count)]


# --- what is asked for


def test_what_is_asked_for(world, make, stand_in, monkeypatch):
    """Token ids and the policy's own distribution, nothing of the server's defaults; the tag of the
    launcher, or of the rank."""
    one = stand_in()
    sampling = request(3)._replace(names=["s7-p4", "s7-p5", "s7-p6"])
    make(one).generate(PROMPTS, 2, sampling)
    monkeypatch.setenv("VLLM_CLIENT_TAG", "job-9")
    make(one).generate(PROMPTS, 2, sampling)
    names = [f"{tag}-s7-p{i}" for tag in ("job-9", "rank-0-of-1") for i in (4, 5, 6)]
    assert sorted(one.request_ids()) == names
    for body, headers in one.completions():
        name = headers["X-Request-Id"]
        assert name.startswith(headers["X-VLLM-Client-Tag"] + "-s7-p")
        i = int(name[-1]) - 4
        assert body == {
            "model": "policy",
            "prompt": PROMPTS[i],
            "n": 2,
            "max_tokens": 12,
            "seed": sampling.seeds[i],
            "temperature": 0.8,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": [0],
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }


def test_a_prompt_that_is_too_long_never_leaves(world, make, stand_in):
    one = stand_in()
    engine = make(one)
    with pytest.raises(ValueError, match="17 tokens must not leave: max_prompt_length=16"):
        engine.generate([[1] * 16, [1] * 17], 2, request(2))
    assert not one.completions()
    assert len(engine.generate([[1] * 16], 2, request(1))) == 2


def test_never_more_requests_at_a_time_than_the_window_and_prompts_keep_their_order(
    world, make, stand_in, monkeypatch
):
    monkeypatch.setattr(server_engine, "CONCURRENCY", 3)
    one = stand_in(seconds=0.03)
    two = stand_in(seconds=0.03)
    prompts = some_prompts(20)
    done = []

    def group_done(i, group):
        done.append((i, [r["prompt_ids"] for r in group]))

    rollouts = make(one, two).generate(prompts, 2, request(20), group_done)
    assert [r["prompt_ids"] for r in rollouts] == [ids for ids in prompts for _ in range(2)]
    assert sorted(done) == [(i, [ids, ids]) for i, ids in enumerate(prompts)]
    assert max(one.most, two.most) <= 3
    assert len(one.completions()) == len(two.completions()) == 10
    alone = stand_in(seconds=0.03)
    alone.plan = together(3)
    engine = make(alone)
    engine.generate(prompts, 2, request(20))
    assert alone.most == 3
    assert engine.generate([], 2, request(0)) == []


def test_seed_rows_of_infoseed_are_all_asked_for_with_ids_of_their_own(
    world, make, stand_in, tiny_model_dir
):
    one = stand_in()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    c = load_config(["--info_seed_num_seeds=3", "--max_prompt_length=48"])
    rows = [
        {"prompt": "1 2 = 3", "prompt_ids": [1, 2], "system_prompt": ""},
        {"prompt": "2 2 = 4", "prompt_ids": [3, 4], "system_prompt": ""},
    ]
    engine = make(one, max_prompt_length=48)
    sampling = request(2)._replace(names=["x", "y"])
    rollouts = infoseed.add_completions(engine, tokenizer, rows, [], sampling, c)
    assert [r["seed_id"] for r in rollouts] == [0, 1, 2] * 2
    assert len(set(one.request_ids())) == 6


# --- servers that fail


def test_a_server_that_nobody_answers_at_any_more_is_left_out_and_comes_back_with_the_next_sync(
    world, naps, make, stand_in, capsys
):
    one = stand_in()
    two = stand_in()
    engine = make(one, two)
    port = one.http.server_port
    one.close()
    assert len(engine.generate(PROMPTS, 2, request(3))) == 6
    assert engine.take_metrics()["rollout/servers"] == 1
    assert "left out until the next sync" in capsys.readouterr().out
    assert len(two.completions()) == 3

    engine.sync(any_weights())  # it is still not there
    assert list(engine.missing) == [one.url]
    assert bare(engine.generate(PROMPTS, 2, request(3))) == expected()

    successor = stand_in(port)
    engine.sync(any_weights())
    assert not engine.missing
    assert bare(engine.generate(PROMPTS, 2, request(3))) == expected()
    assert successor.completions()

    successor.close()
    two.close()
    none_left = f"no rollout server is left of {one.url}, {two.url}"
    with pytest.raises(RolloutsLost, match=none_left) as caught:
        engine.generate(PROMPTS, 2, request(3))
    assert str(caught.value).count(one.url) >= 2  # the sentence says why


def test_a_connection_that_breaks_once_does_not_cost_the_only_server(world, naps, make, stand_in):
    one = stand_in()
    engine = make(one)
    one.plan = [BAD["the connection cut off"]]
    assert len(engine.generate(PROMPTS, 2, request(3))) == 6


def test_a_hiccup_that_many_requests_meet_at_once_does_not_cost_the_only_server(
    world, naps, make, stand_in
):
    one = stand_in(seconds=0.05)
    engine = make(one)
    one.plan = [BAD["503, empty"]] * 6
    assert len(engine.generate(some_prompts(6), 2, request(6))) == 12


def test_a_server_that_fails_three_times_in_a_row_is_left_out_while_there_is_another(
    world, naps, make, stand_in, monkeypatch
):
    monkeypatch.setattr(server_engine, "CONCURRENCY", 1)
    bad = stand_in(completion=BAD["500"])
    engine = make(bad, stand_in())
    assert len(engine.generate(some_prompts(12), 2, request(12))) == 24
    assert len(bad.completions()) == server_engine.STRIKES
    assert engine.take_metrics() == {
        "rollout/failed": 3,
        "rollout/foreign": 0,
        "rollout/refilled": 0,
        "rollout/servers": 1,
    }
    assert engine.take_metrics()["rollout/failed"] == 0
    # after a sync it begins anew: once is not three times
    engine.sync(any_weights())
    bad.plan = [BAD["500"]]
    bad.completion = usual
    engine.generate(some_prompts(12), 2, request(12))
    assert engine.take_metrics()["rollout/servers"] == 2


@pytest.mark.parametrize(
    "plan",
    [[BAD["500"], usual] * 4, [BAD["a foreign echo in the header"]] * 5],
    ids=["now and then", "not ours"],
)
def test_a_server_is_not_left_out_for_failures_with_successes_in_between_or_for_foreign_answers(
    plan, world, naps, make, stand_in, monkeypatch
):
    monkeypatch.setattr(server_engine, "CONCURRENCY", 1)
    one = stand_in()
    engine = make(one, stand_in())
    one.plan = list(plan)
    assert len(engine.generate(some_prompts(20), 2, request(20))) == 40
    assert len(engine.live) == 2
    assert not one.plan


def test_a_proxy_that_mixes_clients_never_gets_a_foreign_answer_through(
    world, naps, make, stand_in, monkeypatch
):
    """It swaps the answers of requests that are under way together: ours with those of another run,
    which asks for the same prompt, and ours among each other. Either all is right in the end, after
    more tries, or the run ends with a sentence about who is to blame."""
    monkeypatch.setenv("VLLM_CLIENT_TAG", "ours")
    mixer = stand_in(stand_in().url, kind=Proxy, mixes=True)
    engine = make(mixer)
    mixer.patience = PATIENCE  # the other run always asks
    theirs = httpx.Client(base_url=mixer.url, timeout=PATIENCE, trust_env=False)
    stop = threading.Event()

    def other_run():
        body = {"prompt": PROMPTS[0], "n": 2, "seed": 5, "max_tokens": 12}
        while not stop.is_set():
            theirs.post("/v1/completions", json=body, headers={"X-Request-Id": "theirs-s1-p0"})

    def ask(prompts) -> str:
        try:
            rollouts = engine.generate(prompts, 2, request(len(prompts)))
        except RolloutsLost as error:
            return str(error)
        assert len(rollouts) == 2 * len(prompts)
        for r in rollouts:
            assert r["completion_ids"][0] == r["prompt_ids"][0]
            assert r["completion_ids"][1] != 5  # the other run's seed
        return ""

    threads = [threading.Thread(target=other_run) for _ in range(3)]
    for thread in threads:
        thread.start()
    sentence = ask(PROMPTS[:1])
    mixer.patience = 0.5  # seconds: no partner may be left
    stop.set()
    for thread in threads:
        thread.join()
    theirs.close()
    for words in ("ours-s1-p0", "theirs-s1-p0", "a proxy", "rollout_server", "X-Request-Id"):
        assert words in sentence
    assert engine.take_metrics()["rollout/foreign"] == server_engine.TRIES

    sentence = ask(some_prompts(5))  # our own, mixed with each other
    assert engine.take_metrics()["rollout/foreign"] > 0
    assert not sentence or "a proxy" in sentence
    assert ask(PROMPTS[:1]) == ""  # alone


def open_sockets() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        count += os.path.exists(path) and os.readlink(path).startswith("socket")
    return count


def test_no_thread_and_no_socket_is_left_behind(world, naps, make, stand_in):
    one = stand_in()
    make(one).close()  # what is opened once per process is
    gc.collect()  # nothing of earlier tests is closed later
    before = (threading.active_count(), open_sockets())
    for _ in range(3):
        engine = make(one)
        one.plan = [BAD["500"], BAD["truncated JSON"]]
        engine.generate(PROMPTS, 2, request(3))
        engine.begin(PROMPTS, 2, request(3), None)
        engine.generate(PROMPTS, 2, request(3))
        one.completion = BAD["500"]
        with pytest.raises(RolloutsLost):
            engine.generate(PROMPTS, 2, request(3))
        one.completion = usual
        engine.close()
    end = time.monotonic() + PATIENCE
    while threading.active_count() > before[0] or open_sockets() > before[1]:
        assert time.monotonic() < end, (threading.enumerate(), before, open_sockets())
        time.sleep(0.05)


# --- several ranks


def test_ranks_spread_over_the_servers_with_tags_of_their_own_and_add_up_their_counts(
    two_ranks, naps, make, stand_in
):
    one = stand_in()
    two = stand_in()
    engines = two_ranks.run(lambda rank: make(one, two))
    two.plan = [BAD["500"]]
    found = two_ranks.run(lambda rank: engines[rank].generate([PROMPTS[rank]], 2, request(1)))
    prompts = [[r["prompt_ids"] for r in rollouts] for rollouts in found]
    assert prompts == [[PROMPTS[0]] * 2, [PROMPTS[1]] * 2]
    # the one that failed has gone to the other server, before or after that one's own
    assert sorted(one.request_ids()) == ["rank-0-of-2-s1-p0", "rank-1-of-2-s1-p0-a1"]
    assert two.request_ids() == ["rank-1-of-2-s1-p0"]
    counts = {
        "rollout/failed": 1,
        "rollout/foreign": 0,
        "rollout/refilled": 0,
        "rollout/servers": 2,
    }
    assert two_ranks.run(lambda rank: engines[rank].take_metrics()) == [counts] * 2
    assert len(one.paths("/collective_rpc")) == 1  # rank 0 hands the weights over
    assert engines[0].version == engines[1].version


def test_a_server_that_one_rank_has_lost_counts_as_lost(two_ranks, make, stand_in):
    one, two = stand_in(), stand_in()
    engines = two_ranks.run(lambda rank: make(one, two))
    engines[1].live.remove(engines[1].live[0])
    found = two_ranks.run(lambda rank: engines[rank].take_metrics()["rollout/servers"])
    assert found == [1, 1]


def test_request_ids_of_an_evaluation_differ_between_ranks_and_from_one_time_to_the_next(
    two_ranks, make, stand_in, monkeypatch
):
    monkeypatch.setenv("VLLM_CLIENT_TAG", "shared")
    one = stand_in()
    engines = two_ranks.run(lambda rank: make(one))
    for _ in range(2):
        two_ranks.run(lambda rank: engines[rank].sync(any_weights()))
        two_ranks.run(lambda rank: engines[rank].generate(PROMPTS, 2, sampling(0, 3)))
    assert len(set(one.request_ids())) == 12


def test_what_is_lost_on_one_rank_is_lost_on_all(two_ranks, short_wait, make, stand_in):
    def fails_for_rank_1(request):
        tag = request.headers["X-VLLM-Client-Tag"]
        return BAD["500"](request) if tag == "rank-1-of-2" else usual(request)

    def both_raise(kind, work) -> None:
        first, second = two_ranks.outcomes(work)
        assert isinstance(first, kind)
        assert isinstance(second, kind)
        assert str(first) == str(second)

    one = stand_in()
    engines = two_ranks.run(lambda rank: make(one))
    one.completion = fails_for_rank_1
    both_raise(RolloutsLost, lambda rank: engines[rank].generate(PROMPTS, 2, request(3)))
    both_raise(UserError, lambda rank: make(dead_url()))
    both_raise(RunStopped, lambda rank: make(one, weight_sync="/dev/null/x"))


# --- a step ahead


def test_no_server_gets_new_weights_while_another_rank_still_samples(two_ranks, make, stand_in):
    """Each rank has begun its next rollouts and then syncs; rank 1 has a slow prompt."""

    def slow_for_rank_1(request):
        if request.body["prompt"] == PROMPTS[1]:
            time.sleep(0.6)
        return usual(request)

    one = stand_in(completion=slow_for_rank_1)
    engines = two_ranks.run(lambda rank: make(one))

    def step(rank):
        engine = engines[rank]
        engine.begin([PROMPTS[rank]], 2, request(1), None)
        engine.sync(any_weights())
        return bare(engine.generate([PROMPTS[rank]], 2, request(1)))

    assert two_ranks.run(step) == [expected(PROMPTS[:1]), expected([PROMPTS[1]])]
    order = one.paths("/collective_rpc", "answered")
    assert order == ["/collective_rpc", "answered", "answered", "/collective_rpc"]
    assert not engines[0].missing


def test_what_is_sampled_ahead_can_be_awaited_before_weights_change(world, make, stand_in):
    gate = threading.Event()
    one = stand_in(completion=lambda request: gate.wait(60) and usual(request))
    engine = make(one)
    engine.wait()  # nothing is under way
    engine.begin(PROMPTS, 2, request(3), None)
    threading.Timer(0.1, gate.set).start()
    engine.wait()
    assert gate.is_set() and engine.ahead[1].done()


def test_rollouts_of_the_next_step_are_made_while_this_one_is_learnt_from(world, make, stand_in):
    gate = threading.Event()
    one = stand_in(completion=lambda request: gate.wait(60) and usual(request))
    engine = make(one)
    done = []
    engine.begin(PROMPTS, 2, request(3), lambda i, group: done.append(i))
    _, begun = engine.ahead
    assert not begun.done()  # begin has not waited: the answers are behind the gate
    gate.set()
    wait([begun], timeout=PATIENCE)  # learning, while nobody asks for the result
    assert begun.done()
    assert sorted(done) == [0, 1, 2]
    assert bare(engine.generate(PROMPTS, 2, request(3))) == expected()
    assert len(one.completions()) == 3  # nothing was asked for again


def test_what_was_begun_waits_for_the_call_that_asks_for_the_same(world, make, stand_in):
    one = stand_in()
    engine = make(one)
    engine.begin(PROMPTS, 2, request(3), None)
    engine.generate(PROMPTS[:1], 2, request(1, seed=9))  # such as an evaluation in between
    engine.generate(PROMPTS, 2, request(3))
    assert len(one.completions()) == 4
    engine.generate(PROMPTS, 2, request(3))
    assert len(one.completions()) == 7


def test_rewards_may_be_asked_for_by_rollouts_made_ahead_while_others_are_awaited():
    """From a thread of its own: answers must neither be lost nor be read by the other."""

    def job(length: int) -> tuple:
        return "parity_reward:parity", "x" * length, {"answer": ""}

    pool = workers.Pool(2, 20.0, 2.0)
    stop = threading.Event()
    asked = {}

    def come_ahead():
        while not stop.is_set() and len(asked) < 5000:
            jobs = {("ahead", len(asked)): job(len(asked) % 7)}
            pool.ask(jobs)
            asked.update(jobs)

    pool.collect({"ready": job(0)})
    thread = ThreadPoolExecutor(1).submit(come_ahead)
    try:
        for step in range(30):
            found = pool.collect({("now", step, i): job(i) for i in range(6)})
            assert list(found.values()) == [0, 1, 0, 1, 0, 1]
    finally:
        stop.set()
    thread.result(10)
    for key, value in pool.collect(asked).items():
        assert value == len(asked[key][1]) % 2
    pool.close()
