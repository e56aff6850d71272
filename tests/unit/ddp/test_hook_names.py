"""The list of hooks by name: every parameter of every hook, and errors that list what there is."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args

import pytest
from torch import nn

from fedring.codec.precision import Precision
from fedring.compress.correction import Feedback
from fedring.ddp import DGC, DGCState
from fedring.ddp.hooks import Int8State, PowerSGDState, TopKState, by_name, hook_by_name
from fedring.ddp.hooks.plain import PlainState
from fedring.train.names import hooks
from fedring.train.names.hooks import PARAMETERS, choose_hook, split_hooks

STATES: dict[str, Callable[..., Any]] = {
    "int8": Int8State,
    "topk": TopKState,
    "powersgd": PowerSGDState,
    "batched_powersgd": PowerSGDState,
}
OTHER_DEFAULTS = {"start_powerSGD_iter": 2}  # where scripts have torch's 1000


def parameters_of(name: str) -> dict[str, Any]:
    """Return the parameters of the hook's state with their defaults, except for the group and the names."""
    if name == "dgc":
        return {field.name: field.default for field in fields(DGC)}
    if name not in STATES:
        return {}
    found = inspect.signature(STATES[name]).parameters
    return {key: one.default for key, one in found.items() if key not in ("process_group", "named_parameters")}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_hook_by_name_has_all_parameters_of_its_state_and_their_defaults(name: str) -> None:
    expected = parameters_of(name)
    expected |= {key: value for key, value in OTHER_DEFAULTS.items() if key in expected}
    assert choose_hook(name).parameters == expected


def test_every_name_has_a_hook() -> None:
    assert PARAMETERS.keys() == by_name.HOOKS.keys()


def test_the_choices_of_parameters_are_those_of_the_states() -> None:
    assert set(get_args(hooks.Feedback)) == set(get_args(Feedback))
    for kind in (hooks.TopKParameters, hooks.DGCParameters):
        assert set(get_args(kind.model_fields["precision"].annotation)) == set(get_args(Precision))


def test_parameters_reach_the_state() -> None:
    net = nn.Linear(2, 2)

    def state(text: str, **given: Any) -> Any:
        return hook_by_name(text, net.named_parameters(), **given).state

    assert state("int8(chunk=128)").chunk == 128
    topk = state(" topk( ratio = 0.05 , precision=fp32)", ratio=0.5, feedback="ef21")
    assert (topk.ratio, topk.precision, topk.feedback) == (0.05, "fp32", "ef21")
    power = state("batched_powersgd(warm_start=false,matrix_approximation_rank=3,orthogonalization_epsilon=1e-8)")
    assert (power.warm_start, power.matrix_approximation_rank, power.orthogonalization_epsilon) == (False, 3, 1e-8)
    dgc = state("dgc(clip=2, momentum=0, strided=no)")
    assert isinstance(dgc, DGCState)
    assert (dgc.config.clip, dgc.config.momentum, dgc.config.strided) == (2.0, 0.0, False)
    assert isinstance(state("fp16"), PlainState)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "zip",
            "there is no hook 'zip': choose from none, fp16, bf16, int8, topk, powersgd, batched_powersgd, dgc, noop",
        ),
        ("topk(ratio=0.1", "there is no hook"),
        ("", "there is no hook ''"),
        ("topk(rati=0.1)", "hook topk has no parameter 'rati': it takes ratio, precision, feedback"),
        ("fp16(ratio=0.1)", "hook fp16 has no parameter 'ratio': it takes none at all"),
        ("topk(ratio=2)", "hook topk cannot work with ratio='2': Input should be less than or equal to 1"),
        ("topk(ratio=0.1,ratio=0.2)", "write each parameter of a hook once, as name=value, not 'ratio=0.2'"),
        ("topk(0.1)", "write each parameter of a hook once, as name=value, not '0.1'"),
        ("int8(feedback=most)", "cannot work with feedback='most': Input should be 'none', 'ef' or 'ef21'"),
        ("powersgd(start_powerSGD_iter=1)", "hook powersgd: start_powerSGD_iter must be above 1"),
        ("fp16(powersgd(rank=1))", "hook powersgd has no parameter 'rank': it takes matrix_approximation_rank, "),
        ("fp16(zip)", "there is no hook 'zip'"),
        ("fp16(bf16)", "hook fp16 cannot wrap 'bf16': it wraps a hook other than fp16 and bf16"),
        ("topk(fp16)", "write each parameter of a hook once, as name=value, not 'fp16'"),
        ("dgc(nesterov=true,momentum=0)", "hook dgc: nesterov needs a momentum above 0"),
    ],
)
def test_unknown_names_and_values_are_refused_with_those_that_exist(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"hook") as refused:
        hook_by_name(text, [])
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("int8", {"chunk": 0}),
        ("int8", {"chunk": 6}),
        ("topk", {"ratio": 0.0}),
        ("topk", {"ratio": 1.5}),
        ("topk", {"precision": "fp8"}),
        ("topk", {"feedback": "most"}),
        ("powersgd", {"matrix_approximation_rank": 0}),
        ("powersgd", {"start_powerSGD_iter": 1}),
        *(
            ("dgc", {key: value})
            for key, value in [
                ("ratio", 0.0),
                ("warmup_epochs", -1),
                ("momentum", 1.0),
                ("clip", 0.0),
                ("clip_norm", "all"),
                ("precision", "fp8"),
                ("min_numel_to_compress", -1),
                ("sample_ratio", 0.0),
                ("lower_bound", 1.0),
                ("upper_bound", 1.0),
                ("max_iterations", -1),
            ]
        ),
    ],
)
def test_a_state_refuses_the_same_values_as_the_list(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        choose_hook(name, wrong)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DGC(**wrong) if name == "dgc" else STATES[name](None, **wrong)


def test_every_parameter_says_what_it_does() -> None:
    for kind in PARAMETERS.values():
        assert all(field.description for field in kind.model_fields.values())


def test_a_hook_can_be_wrapped() -> None:
    chosen = choose_hook(" bf16( powersgd(matrix_approximation_rank=4, warm_start=no) )")
    assert (chosen.name, chosen.wrapper) == ("powersgd", "bf16")
    assert (chosen.parameters["matrix_approximation_rank"], chosen.parameters["warm_start"]) == (4, False)
    assert choose_hook("fp16") == ("fp16", {}, "")
    state, hook = hook_by_name("fp16(powersgd)", nn.Linear(2, 2).named_parameters())
    assert isinstance(state, PowerSGDState)
    assert "fp16_compress_wrapper" in hook.__qualname__
    assert "bf16_wrapper" in hook_by_name("bf16(none)", []).hook.__qualname__


def test_commas_in_parentheses_do_not_separate_hooks() -> None:
    wrapped = "fp16(powersgd(warm_start=no,random_seed=1))"
    assert split_hooks(f"{wrapped}, dgc(clip=1,momentum=0),bf16(topk)") == [
        wrapped,
        "dgc(clip=1,momentum=0)",
        "bf16(topk)",
    ]
    assert split_hooks("none, topk(ratio=0.1,feedback=ef21) ,,dgc") == ["none", "topk(ratio=0.1,feedback=ef21)", "dgc"]
    assert split_hooks("") == []


def test_a_hook_without_a_memory_has_a_state_too() -> None:
    state, _ = hook_by_name("none", nn.Linear(2, 2).named_parameters())
    assert (state.owed(), state.shared(), state.residual_norm, state.ratio) == ({}, {}, 0.0, 1.0)
    state.undo()
    state.end_step()
    assert state.profile.steps == 0
