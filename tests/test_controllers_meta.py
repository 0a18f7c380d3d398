"""The meta-controller: its potential in plain Python, gradients by differences, its steps, and
where it works and where it does not."""

import copy
import math

import pytest
import torch
from controlled import DEFAULTS, METHODS, ORDINARY, resumes_exactly, setting, through_json
from hypothesis import given, settings
from hypothesis import strategies as st

import controllers
import loss

AIM = (1.6, 0.5)  # H*, KL* of setting(): see controlled.TARGETS


# --- the potential and its gradient


def softmax(x):
    top = max(x)
    e = [math.exp(a - top) for a in x]
    return [a / sum(e) for a in e]


def literal_potential(tau, beta, batch, targets, virtual):
    """Section 6 of the mathematics in plain Python: Phi, H, K."""
    H = K = 0.0
    groups = len(batch["scores"])
    for i in range(groups):
        u = batch["utilities"][i].tolist()
        s = batch["scores"][i].tolist()
        l = batch["ref_scores"][i].tolist()
        w = softmax([(a + beta * b) / (tau + beta) for a, b in zip(u, l)])
        for _ in range(virtual.steps):
            s = [a + virtual.lr * (x - y) for a, x, y in zip(s, w, softmax(s))]
        H -= sum(x * math.log(x) for x in w if x > 0) / groups
        K += sum(x * math.log(x / y) for x, y in zip(softmax(s), softmax(l))) / groups
    return 0.5 * (H - targets[0]) ** 2 + 0.5 * (K - targets[1]) ** 2, H, K


def literal_gradient(tau, beta, batch, targets, virtual):
    """Central differences of Phi by (log tau, log beta)."""

    def phi(log_tau, log_beta):
        tau_there = tau * math.exp(log_tau)
        beta_there = beta * math.exp(log_beta)
        return literal_potential(tau_there, beta_there, batch, targets, virtual)[0]

    h = 1e-5
    return (phi(h, 0) - phi(-h, 0)) / (2 * h), (phi(0, h) - phi(0, -h)) / (2 * h)


def table(low, high):
    """(2, 4) numbers."""
    row = st.lists(st.floats(low, high), min_size=4, max_size=4)
    rows = st.lists(row, min_size=2, max_size=2)
    return rows.map(lambda rows: torch.tensor(rows, dtype=torch.float64))


batches = st.fixed_dictionaries(
    {"utilities": table(-3, 0), "scores": table(-2, 2), "ref_scores": table(-2, 2)}
)
temperature = st.floats(0.2, 3.0)
few = settings(max_examples=40)


def gradient_errors(batch, config):
    """How far Phi, H, K and the gradient are from the literal ones, relative."""
    tau = config["maxent_tau"]
    beta = config["beta"]
    virtual = controllers.virtual_policy(config)
    measured, gradient = controllers.meta_gradient(controllers.init_state(config), batch, config)
    literal = [*literal_potential(tau, beta, batch, AIM, virtual)]
    literal += literal_gradient(tau, beta, batch, AIM, virtual)
    # differences are exact to about 1e-9
    found = (*measured, *gradient)
    return [abs(x - y) / (abs(y) + 1e-4) for x, y in zip(found, literal, strict=True)]


@pytest.mark.parametrize(
    "method, hessian", [("first_order", True), ("first_order", False), ("truncated_backprop", True)]
)
@few
@given(batches, temperature, temperature, st.floats(0.1, 3.9), st.integers(1, 8))
def test_gradient_equals_central_differences_of_the_literal_potential(  # noqa: PLR0913
    method, hessian, batch, tau, beta, rate, truncation
):
    config = setting(method, maxent_tau=tau, beta=beta)
    config |= {"controller_meta_use_hessian": hessian, "controller_meta_virtual_lr": rate}
    config["controller_meta_truncation_steps"] = truncation
    assert max(gradient_errors(batch, config)) < 1e-4


def test_without_the_hessian_only_one_virtual_step_has_the_true_gradient():
    config = setting("truncated_backprop", maxent_tau=0.3, beta=0.3)
    config["controller_meta_truncation_steps"] = 8
    assert max(gradient_errors(ORDINARY, config)) < 1e-4
    config["controller_meta_use_hessian"] = False
    *measured, by_tau, by_beta = gradient_errors(ORDINARY, config)
    assert max(measured) < 1e-12 and by_tau > 0.01 and by_beta > 0.01
    config["controller_meta_truncation_steps"] = 1
    assert max(gradient_errors(ORDINARY, config)) < 1e-4


@few
@given(batches, temperature, temperature, st.integers(0, 4), st.floats(0.1, 3.9))
def test_potential_entropy_and_kl_are_the_literal_ones(batch, tau, beta, steps, rate):
    virtual = controllers.Virtual(steps, rate, True)
    logs = torch.tensor([tau, beta]).log().double()
    measured = [
        x.item()
        for x in controllers.potential(*logs, batch, controllers.Setpoints(1.0, 0.2), virtual)
    ]
    tau, beta = logs.exp().tolist()  # as rounded as there
    literal = literal_potential(tau, beta, batch, (1.0, 0.2), virtual)
    assert measured == pytest.approx(literal, rel=1e-9, abs=1e-12)


def kl_of_policy(batch, tau=0.3, beta=0.3, steps=0, rate=1.0):
    logs = torch.tensor([tau, beta], dtype=torch.float64).log()
    virtual = controllers.Virtual(steps, rate, True)
    _, _, K = controllers.potential(*logs, batch, controllers.Setpoints(*AIM), virtual)
    return K.item()


@few
@given(table(-2, 2), table(-3, 0), temperature, temperature, st.floats(-5, 5))
def test_the_kl_is_zero_where_the_policy_is_the_reference(ref, utilities, tau, beta, shift):
    # a common shift is no difference
    batch = {"utilities": utilities, "scores": ref + shift, "ref_scores": ref}
    assert abs(kl_of_policy(batch, tau, beta)) < 1e-12


def entropy_slopes(batch, tau, beta):
    """dH/dtau and dH/dbeta of potential()."""
    log_tau, log_beta = torch.tensor([tau, beta], dtype=torch.float64).log()
    log_tau.requires_grad_()
    log_beta.requires_grad_()
    virtual = controllers.Virtual(1, 1.0, True)
    _, H, _ = controllers.potential(log_tau, log_beta, batch, controllers.Setpoints(*AIM), virtual)
    by_log_tau, by_log_beta = torch.autograd.grad(H, [log_tau, log_beta])
    return by_log_tau.item() / tau, by_log_beta.item() / beta


def centred(x, w):
    """x minus its mean under the weights w, group by group."""
    return x - (w * x).sum(1, keepdim=True)


@few
@given(batches, temperature, temperature)
def test_slopes_of_the_entropy_have_their_closed_forms(batch, tau, beta):
    u = batch["utilities"]
    l = batch["ref_scores"]
    w = loss.maxent_weights(u, l, tau, beta)
    a = centred(u + beta * l, w)
    b = centred(tau * l - u, w)
    variance = (w * a * a).sum(1).mean().item()
    covariance = (w * a * b).sum(1).mean().item()
    closed = (variance / (tau + beta) ** 3, -covariance / (tau + beta) ** 3)
    assert entropy_slopes(batch, tau, beta) == pytest.approx(closed, rel=1e-6, abs=1e-9)
    assert variance >= 0


def test_more_beta_can_flatten_the_weights_or_sharpen_them():
    slope = torch.tensor([[0.0, -1.0, -2.0, -3.0]], dtype=torch.float64)
    zero = torch.zeros(1, 4, dtype=torch.float64)
    flat_reference = {"utilities": slope, "scores": zero, "ref_scores": zero}
    sharp_reference = {"utilities": zero, "scores": zero, "ref_scores": slope}
    assert entropy_slopes(flat_reference, 0.5, 0.5)[1] > 0.1
    assert entropy_slopes(sharp_reference, 0.5, 0.5)[1] < -0.1


# --- steps


@pytest.fixture
def no_differentiation(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("differentiated")

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    monkeypatch.setattr(torch.autograd, "backward", refuse)


def test_analytic_takes_the_residuals_without_differentiation(no_differentiation):
    config = setting("analytic", maxent_tau=0.4, beta=0.7)
    as_measured = controllers.Virtual(0, 1.0, True)
    phi, H, K = literal_potential(0.4, 0.7, ORDINARY, AIM, as_measured)
    state, metrics = controllers.meta_step(controllers.init_state(config), ORDINARY, config)
    assert metrics["meta/tau_grad"] == pytest.approx(H - 1.6, rel=1e-9)
    assert metrics["meta/beta_grad"] == pytest.approx(0.5 - K, rel=1e-9)
    found = [metrics[f"meta/{name}"] for name in ("loss", "entropy", "kl")]
    assert found == pytest.approx([phi, H, K], rel=1e-9)
    assert metrics["meta/grad_norm"] == pytest.approx(math.hypot(H - 1.6, 0.5 - K), rel=1e-9)
    assert state["tau"] == pytest.approx(0.4 * math.exp(-0.1 * (H - 1.6)), rel=1e-9)
    assert state["beta"] == pytest.approx(0.7 * math.exp(0.1 * (K - 0.5)), rel=1e-9)
    with pytest.raises(AssertionError, match="differentiated"):
        controllers.meta_step(state, ORDINARY, setting("first_order"))


def test_the_residuals_are_the_gradient_of_a_convex_function():
    """Why analytic arrives from everywhere: V = mean max_w <w, u> + tau * H(w) - beta * KL(w ||
    ref) is convex in (tau, beta), and once the policy is w, V - tau * H* + beta * KL* has the
    slopes H - H* and KL* - K."""
    u = ORDINARY["utilities"]
    ref = ORDINARY["ref_scores"]
    log_ref = ref.log_softmax(1)

    def value(tau, beta):
        V = (tau + beta) * ((u + beta * log_ref) / (tau + beta)).logsumexp(1)
        return V.mean().item() - 1.6 * tau + 0.5 * beta

    h = 1e-5
    for tau, beta in ((0.2, 0.2), (1.0, 0.1), (0.1, 2.0)):
        config = setting("analytic", maxent_tau=tau, beta=beta)
        settled = ORDINARY | {"scores": loss.maxent_weights(u, ref, tau, beta).log()}
        by_tau = (value(tau + h, beta) - value(tau - h, beta)) / (2 * h)
        by_beta = (value(tau, beta + h) - value(tau, beta - h)) / (2 * h)
        state = controllers.init_state(config)
        _, gradient = controllers.meta_gradient(state, settled, config)
        assert gradient == pytest.approx((by_tau, by_beta), rel=1e-6)


METRICS = ("loss", "entropy", "kl", "tau_grad", "beta_grad", "grad_norm")
METRICS += ("tau_projected", "beta_projected")


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_moves_both_tau_and_beta(method, optimizer):
    config = setting(method, controller_meta_optimizer=optimizer, maxent_tau=0.3, beta=0.3)
    state, metrics = controllers.meta_step(controllers.init_state(config), ORDINARY, config)
    assert set(metrics) == {f"meta/{name}" for name in METRICS}
    for key in ("tau", "beta"):
        assert abs(math.log(state[key] / 0.3)) > 1e-4
        assert (state[key] > 0.3) == (metrics[f"meta/{key}_grad"] < 0)  # downhill


def test_sgd_subtracts_the_gradient_and_remembers_nothing():
    """Adam would take updates that left no moments for warm ones, after a resume."""
    before = controllers.init_state(DEFAULTS)["meta"]
    meta, moves = controllers.descend(before, [0.25, -3.0], "sgd")
    assert moves == [0.25, -3.0] and meta == before
    assert controllers.descend(meta, [2.0, 2.0], "adam")[1] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("method", ["first_order", "truncated_backprop"])
def test_the_gradient_is_finite_where_weights_underflow(method):
    batch = ORDINARY | {"utilities": ORDINARY["utilities"] * 1e4}
    config = setting(method, maxent_tau=0.01, beta=1e-4)
    measured, gradient = controllers.meta_gradient(controllers.init_state(config), batch, config)
    assert all(map(math.isfinite, [*measured, *gradient]))


def test_adam_is_torch_adam_on_the_same_gradients():
    noise = torch.randn(300, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = noise * torch.tensor([1.0, 1e-4])
    gradients[100:200] *= 1e3  # a second regime: both moments and their corrections matter
    x = torch.nn.Parameter(torch.tensor([-1.0, 2.0], dtype=torch.float64))
    optimizer = torch.optim.Adam([x], lr=0.05)
    own = [-1.0, 2.0]
    meta = controllers.init_state(DEFAULTS)["meta"]
    for gradient in gradients:
        x.grad = gradient.clone()
        optimizer.step()
        meta, moves = controllers.descend(meta, gradient.tolist(), "adam")
        own = [a - 0.05 * move for a, move in zip(own, moves)]
        assert own == pytest.approx(x.tolist(), rel=0, abs=1e-12)
    assert meta["updates"] == 300


def one_step(config, batch=ORDINARY):
    """(state, metrics) after the first step of a run."""
    return controllers.meta_step(controllers.init_state(config), batch, config)


def test_the_gradient_by_log_beta_is_clipped_and_the_one_by_log_tau_is_not():
    free = setting("analytic", kl_target=3.0, beta=0.3)
    clipped = free | {"controller_meta_beta_grad_clip": 0.01}
    _, free_metrics = one_step(free)
    assert free_metrics["meta/beta_grad"] > 1 and abs(free_metrics["meta/tau_grad"]) > 0.01
    state, metrics = one_step(clipped)
    assert metrics["meta/beta_grad"] == 0.01
    assert state["beta"] == pytest.approx(0.3 * math.exp(-0.1 * 0.01), rel=1e-12)
    assert metrics["meta/tau_grad"] == free_metrics["meta/tau_grad"]
    assert one_step(clipped | {"kl_target": 1e-4})[1]["meta/beta_grad"] == -0.01
    wide = one_step(free | {"controller_meta_beta_grad_clip": 5.0})[1]
    assert wide["meta/beta_grad"] == free_metrics["meta/beta_grad"]


def test_an_update_interval_moves_every_so_many_steps_and_counts_all():
    config = setting("analytic", controller_meta_update_interval=3, maxent_tau=0.3, beta=0.3)
    config["controller_meta_optimizer"] = "adam"
    state = controllers.init_state(config)
    moved = []
    for step in range(8):
        before = state
        state, metrics = controllers.meta_step(state, ORDINARY, config)
        moved.append(state["tau"] != before["tau"] and state["beta"] != before["beta"])
        assert state["step"] == step + 1 and bool(metrics) == moved[-1]
        if not moved[-1]:
            assert state == before | {"step": step + 1}
    assert moved == [True, False, False, True, False, False, True, False]
    assert state["meta"]["updates"] == 3 and state["skipped"] == 0


def test_own_learning_rates_override_the_common_one():
    base = setting("analytic", maxent_tau=0.3, beta=0.3)

    def moves(**rates):
        state, _ = one_step(base | rates)
        return math.log(state["tau"] / 0.3), math.log(state["beta"] / 0.3)

    tau, beta = moves()
    assert moves(controller_meta_tau_lr=0.3) == pytest.approx((3 * tau, beta), rel=1e-9)
    assert moves(controller_meta_beta_lr=0.05) == pytest.approx((tau, beta / 2), rel=1e-9)
    assert moves(controller_meta_lr=0.2) == pytest.approx((2 * tau, 2 * beta), rel=1e-9)
    assert moves(controller_meta_tau_lr=0.0) == pytest.approx((0, beta), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("tau, beta", [(0.2, 0.3), (0.1, 0.05), (10.0, 10.0), (0.01, 1e-4)])
def test_rates_of_zero_hold_tau_and_beta_to_the_bit_and_no_bound_acts(tau, beta):
    config = setting("analytic", maxent_tau=tau, beta=beta)
    config |= {"controller_meta_tau_lr": 0.0, "controller_meta_beta_lr": 0.0}
    state, metrics = one_step(config)
    assert (state["tau"], state["beta"]) == (tau, beta)
    assert metrics["meta/tau_projected"] == metrics["meta/beta_projected"] == 0.0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "key, low, high",
    [("tau", "maxent_tau_min", "maxent_tau_max"), ("beta", "beta_min", "beta_max")],
)
def test_projected_is_one_exactly_where_a_bound_acted(method, key, low, high):
    """With a bound where the value stands: pushed out of it the flag is 1 and the value stays,
    pushed in it is 0 and the value moves."""
    other = "beta" if key == "tau" else "tau"
    config = setting(method, maxent_tau=0.3, beta=0.3)
    grows = one_step(config)[0][key] > 0.3
    for bound, acted in ((high, grows), (low, not grows)):
        state, metrics = one_step(config | {bound: 0.3})
        assert metrics[f"meta/{key}_projected"] == acted and (state[key] == 0.3) == acted
        assert metrics[f"meta/{other}_projected"] == 0
    # ends at a bound, not in an overflow
    state, metrics = one_step(config | {f"controller_meta_{key}_lr": 1e9})
    assert metrics[f"meta/{key}_projected"] == 1 and state[key] == config[high if grows else low]


def spoiled(key, value):
    """An ordinary batch with one number replaced."""
    tensor = ORDINARY[key].clone()
    tensor[1, 2] = value
    return ORDINARY | {key: tensor}


NOT_MEASURED = {
    "no_active_group": {key: value[:0] for key, value in ORDINARY.items()},
    "nan_scores": spoiled("scores", math.nan),
    "nan_ref": spoiled("ref_scores", math.nan),
    "inf_ref": spoiled("ref_scores", -math.inf),
    "nan_utilities": spoiled("utilities", math.nan),
}


@pytest.mark.parametrize("what", NOT_MEASURED)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("method", METHODS)
def test_without_a_measurement_meta_changes_nothing_but_the_counts(method, optimizer, what):
    config = setting(method, controller_meta_optimizer=optimizer, maxent_tau=0.3, beta=0.3)
    state, _ = one_step(config)
    after, metrics = controllers.meta_step(state, NOT_MEASURED[what], config)
    assert after == state | {"step": 2, "skipped": 1}
    assert metrics == {} and state["tau"] != 0.3


@pytest.mark.parametrize("method", METHODS)
def test_meta_takes_the_annealed_target_of_its_step(method):
    config = setting(method, maxent_tau=0.3, beta=0.3)
    annealed = config | {"maxent_target_weight_entropy": {0: 1.6, 10: 1.0}}
    for step in (0, 5, 10, 15):
        state = controllers.init_state(config) | {"step": step}
        fixed = config | {"maxent_target_weight_entropy": 1.6 - 0.06 * min(step, 10)}
        measured, gradient = controllers.meta_gradient(state, ORDINARY, annealed)
        fixed_measured, fixed_gradient = controllers.meta_gradient(state, ORDINARY, fixed)
        assert measured == pytest.approx(fixed_measured, rel=1e-9)
        assert gradient == pytest.approx(fixed_gradient, rel=1e-9)


def test_meta_leaves_its_inputs_as_they_were():
    for method in METHODS:
        config = setting(method, maxent_tau=0.3, beta=0.3)
        state, _ = one_step(config)
        kept_state, kept_config, kept_batch = copy.deepcopy((state, config, ORDINARY))
        after, _ = controllers.meta_step(state, ORDINARY, config)
        assert after != state
        assert state == kept_state and config == kept_config
        assert all(torch.equal(ORDINARY[key], kept_batch[key]) for key in ORDINARY)


# --- where it works and where it does not


def virtual_kls(rate, w, steps):
    """K after each virtual step of a policy that learns w = softmax(u / tau), from the uniform
    policy."""
    batch = {
        "utilities": w.log(),
        "scores": torch.tensor([[0.2, -0.1]], dtype=torch.float64),
        "ref_scores": torch.tensor([[1.0, -1.0]], dtype=torch.float64),
    }
    return [kl_of_policy(batch, 1.0, 1e-12, steps=k, rate=rate) for k in range(steps)]


@pytest.mark.parametrize("rate, settles", [(1.0, True), (3.9, True), (4.5, False)])
def test_a_virtual_policy_settles_below_a_rate_of_4_and_oscillates_above(rate, settles):
    """Two answers at 1/2 are the worst case: diag(p) - p p' has the eigenvalue 1/2 there, and steps
    contract below 2 / (1/2)."""
    half = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    kls = virtual_kls(rate, half, 200)
    jumps = [abs(b - a) for a, b in zip(kls[-20:], kls[-19:])]
    if settles:
        log_ref = torch.tensor([1.0, -1.0], dtype=torch.float64).log_softmax(0)
        limit = (0.5 * (math.log(0.5) - log_ref)).sum().item()
        assert max(jumps) < 1e-3 and kls[-1] == pytest.approx(limit, abs=1e-3)
    else:
        assert min(jumps) > 0.1


# --- wrong variants must be noticed

RIGHT_POTENTIAL = controllers.potential


def detached_entropy(log_tau, log_beta, batch, targets, virtual):
    _, H, K = RIGHT_POTENTIAL(log_tau, log_beta, batch, targets, virtual)
    H = H.detach()
    return 0.5 * (H - targets[0]) ** 2 + 0.5 * (K - targets[1]) ** 2, H, K


def kl_without_reference(log_tau, log_beta, batch, targets, virtual):
    _, H, _ = RIGHT_POTENTIAL(log_tau, log_beta, batch, targets, virtual)
    tau = log_tau.exp()
    beta = log_beta.exp()
    w = ((batch["utilities"] + beta * batch["ref_scores"]) / (tau + beta)).softmax(1)
    s = batch["scores"]
    for _ in range(virtual.steps):
        s = s + virtual.lr * (w - s.softmax(1))
    K = (s.softmax(1) * s.log_softmax(1)).sum(1).mean()
    return 0.5 * (H - targets[0]) ** 2 + 0.5 * (K - targets[1]) ** 2, H, K


@pytest.mark.parametrize("wrong", [detached_entropy, kl_without_reference])
@pytest.mark.parametrize("method", ["first_order", "truncated_backprop"])
def test_central_differences_notice_a_wrong_potential(monkeypatch, wrong, method):
    config = setting(method, maxent_tau=0.3, beta=0.3)
    assert max(gradient_errors(ORDINARY, config)) < 1e-4
    monkeypatch.setattr(controllers, "potential", wrong)
    assert max(gradient_errors(ORDINARY, config)[1:]) > 0.1


def test_the_policy_at_the_reference_notices_a_kl_without_it(monkeypatch):
    monkeypatch.setattr(controllers, "potential", kl_without_reference)
    assert abs(kl_of_policy(ORDINARY | {"scores": ORDINARY["ref_scores"]})) > 0.1


def test_the_round_trip_notices_moments_that_are_not_saved(monkeypatch):
    config = setting("first_order", maxent_tau=0.3, beta=0.3)
    zero = {"m": [0.0, 0.0], "v": [0.0, 0.0]}
    memory = {0: zero}  # number of updates: moments
    right = controllers.descend

    def forgetful(meta, gradient, optimizer):
        """Keeps its moments in the process instead of the state."""
        after, moves = right(meta | memory.get(meta["updates"], zero), gradient, optimizer)
        memory[after["updates"]] = {"m": after["m"], "v": after["v"]}
        return after | zero, moves

    def new_process(state):
        memory.clear()
        return through_json(state)

    assert resumes_exactly(config, new_process)
    monkeypatch.setattr(controllers, "descend", forgetful)
    assert not resumes_exactly(config, new_process)
