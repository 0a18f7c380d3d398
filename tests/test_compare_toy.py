"""python -m compare.toy: the pushes are those of the formulas, and a policy that is a table of
logits ends as the results say of short and of long answers."""

import math

import pytest
import torch
from loss_cases import CASES

import checks
import loss
from common import UserError, load_config, with_tau
from compare import toy
from compare.__main__ import flags_of

P_OF_GROUP = torch.tensor([0.4, 0.4, 0.4, 0.05, 0.4, 0.4, 0.4, 0.001])
P_OF_GROUP = P_OF_GROUP / P_OF_GROUP.sum()  # what softmax(scores) makes of answers of one token


def config(**overrides) -> dict:
    return with_tau(load_config(flags_of(toy.BASE | overrides)), toy.ANSWERS)


def shares(values: list[float]) -> pytest.approx:
    total = sum(abs(value) for value in values)
    return pytest.approx([value / total for value in values], abs=1e-5)


@pytest.mark.parametrize("objective", ["dr_grpo", "grpo", "dapo", "maxrl"])
def test_a_policy_gradient_pushes_every_right_row_alike(objective):
    pushed = toy.pushes_on_group(config(objective=objective)).tolist()
    assert pushed == shares([1.0] * 4 + [-1.0] * 4)


def test_maxent_pushes_by_w_minus_p():
    c = config(objective="maxent")
    z = torch.tensor([1.0] * 4 + [0.0] * 4) / c["maxent_tau"]
    difference = (z.softmax(0) - P_OF_GROUP).tolist()
    assert toy.pushes_on_group(c).tolist() == shares(difference)
    assert difference[3] > 2 * difference[0]  # the rare right answer rises most
    assert abs(difference[7]) < 0.1 * abs(difference[4])  # the rare wrong one is left alone


def test_floored_pushes_the_rare_wrong_row_by_one_gth_at_least():
    c = config(objective="maxent", maxent_loss="floored")
    w = (torch.tensor([1.0] * 4 + [0.0] * 4) / c["maxent_tau"]).softmax(0)
    p = P_OF_GROUP.clone()
    p[4:] = p[4:].clamp(min=1 / 8)
    assert toy.pushes_on_group(c).tolist() == shares((w - p).tolist())


def test_how_much_a_group_counts():
    """dr_grpo: like r (1 - r) of the share r of right rows; maxrl: like 1 - r."""
    share = torch.arange(1, 16) / 16
    variance = share * (1 - share)
    assert torch.allclose(toy.weight_of_groups(config(objective="dr_grpo")), 4 * variance)
    rare = (1 - share) / (1 - 1 / 16)
    assert torch.allclose(toy.weight_of_groups(config(objective="maxrl")), rare)
    # at this tau (1 / ln 24) w is not uniform over the right rows of a group with few of them
    maxent = toy.weight_of_groups(config(objective="maxent", maxent_tau=0.05))
    assert torch.allclose(maxent, rare, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_objective_with_its_settings_runs(case):
    c = config() | case | {"max_steps": 2, "num_generations": 4}
    path, pull = toy.train(with_tau(c, toy.ANSWERS), seed=1)
    assert len(path) == 3
    assert all(map(math.isfinite, [value for step in path for value in step]))
    assert (pull is not None) == (c["objective"] == "maxent" and checks.uses_scores(c))


def end_of(seed: int = 1, **overrides) -> toy.Step:
    return toy.train(config(**overrides), seed)[0][-1]


def test_with_answers_of_one_token_maxent_keeps_all_right_ones_and_policy_gradients_do_not():
    """The seed is fixed; over 20 seeds dr_grpo and maxrl end at 4.0 at most, maxent at 5.99 and
    more."""
    for objective in ("dr_grpo", "maxrl"):
        end = end_of(objective=objective)
        assert end.right > 0.98 and end.different < 4.4
    plain = end_of(objective="maxent")
    assert plain.right == pytest.approx(0.874, abs=0.01)  # where p is w
    assert plain.different > 5.9
    floored = end_of(objective="maxent", maxent_loss="floored")
    assert floored.right > 0.98 and floored.different > 5.9


def test_with_answers_of_many_tokens_p_is_flat_and_maxent_narrows_too():
    c = config(objective="maxent", max_completion_length=32)
    path, pull = toy.train(c, seed=1)
    assert pull < 0.03 < 0.3 < toy.train(config(objective="maxent", max_steps=1), seed=1)[1]
    assert path[-1].right > 0.98 and path[-1].different < 5.5


def test_the_table_shows_a_sign_that_is_wrong(tmp_path, monkeypatch, capsys):
    def negative(rewards, scale, k):
        return -loss.group_advantages(rewards, "none")

    monkeypatch.setitem(loss.ADVANTAGES, "pass_at_k", negative)
    arms = tmp_path / "arms.py"
    arms.write_text('right = {"objective": "dr_grpo"}\nwrong = {"objective": "pkpo"}\n')
    picture = tmp_path / "new" / "toy.png"
    own = {"arms": str(arms), "seeds": 2, "picture": str(picture)}
    toy.main(own, ["--max_steps=60"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| arm | weights/pull | right | different right answers |"
    names = [line.split("|")[1].strip() for line in lines[2:5]]
    shown = [float(line.split("|")[3].split()[0]) for line in lines[2:5]]
    assert names == ["(start)", "right", "wrong"]
    assert shown[1] > shown[0] + 0.2 > shown[0] - 0.1 > shown[2]
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    "own, text, sentence",
    [
        ({"seeds": 0}, "", "--seeds=0 must be at least 1"),
        ({"picture": "toy.gif"}, "", "must end in one of"),
        ({}, "", "names no arm"),
        ({}, 'a = {"objectiv": "maxent"}', "did you mean 'objective'"),
    ],
)
def test_mistakes_are_one_sentence(own, text, sentence, tmp_path):
    arms = tmp_path / "arms.py"
    arms.write_text(text)
    defaults = {"arms": str(arms), "seeds": 1, "picture": ""}
    with pytest.raises(UserError, match=sentence):
        toy.main(defaults | own, [])
