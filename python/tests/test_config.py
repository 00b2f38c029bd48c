"""What `initialize` refuses, by name."""

import json

import pytest
import torch
from test_access import Constant

import oxizero

SGD = {"type": "SGD", "params": {"lr": 1.0}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"stge": 1}}, "did you mean `zero_optimization.stage`"),
        ({"train_batch_size": "auto"}, "`train_batch_size = \"auto\"` is refused"),
        ({"optimizer": {"type": "Lamb"}}, "`optimizer.type = \"Lamb\"`"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.0]}}}, "beta"),
        ({"scheduler": {"type": "StepLR"}}, "pass lr_scheduler"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "`scheduler.params.total_num_steps = null`"),
        ({"activation_checkpointing": {"profile": True}}, "`activation_checkpointing.profile"),
        ({"optimizer": None}, "there is no optimizer"),
        ({"gradient_clipping": float("nan")}, "`gradient_clipping = nan`"),
        ({"optimizer": {"params": {"lr": torch.ones(1)}}}, r"`optimizer.params.lr = tensor"),
    ],
)
def test_a_configuration_is_refused_by_name(config, said):
    with pytest.raises((oxizero.ConfigError, ValueError), match=said):
        oxizero.initialize(model=Constant(), config={"optimizer": SGD} | config)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.optim.LBFGS, "optimizer = LBFGS is refused"),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), "'amsgrad'"),
        (lambda params: torch.optim.SGD(params, dampening=0.5, momentum=0.9), "'dampening'"),
    ],
)
def test_an_optimizer_that_the_engine_lacks_is_refused(make, said):
    with pytest.raises(oxizero.ConfigError, match=said):
        oxizero.initialize(model=Constant(), optimizer=make, config={})


def test_a_model_that_cannot_be_trained_is_refused_by_parameter():
    with pytest.raises(ValueError, match="parameter `weight`.*float64"):
        oxizero.initialize(model=Constant(dtype=torch.float64), config={"optimizer": SGD})
    stranger = torch.optim.SGD(Constant().parameters(), lr=1.0)
    with pytest.raises(oxizero.ConfigError, match="1 parameters that are not the model's"):
        oxizero.initialize(model=Constant(), optimizer=stranger, config={})


def test_a_configuration_is_a_dict_or_a_file_and_there_is_one(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"optimizer": SGD, "zero_optimization": {"stage": 1}}))
    engine, *_ = oxizero.initialize(model=Constant(), config=path)
    assert engine.zero_optimization_stage() == 1
    with pytest.raises(oxizero.ConfigError, match="was given 0"):
        oxizero.initialize(model=Constant())
    path.write_text("{")
    with pytest.raises(oxizero.ConfigError, match="cannot be read"):
        oxizero.initialize(model=Constant(), config=str(path))


def test_an_environment_that_is_no_world_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(oxizero.ConfigError, match="RANK is not set"):
        oxizero.initialize(model=Constant(), config={"optimizer": SGD})
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(oxizero.ConfigError, match="1 of 2 ranks are on this machine"):
        oxizero.initialize(model=Constant(), config={"optimizer": SGD})


@pytest.mark.parametrize(("config", "is_told"), [({}, True), ({"gradient_clipping": 0.0}, False)])
def test_where_nothing_is_clipped_and_deepspeed_would_clip_it_is_told(config, is_told, capsys):
    oxizero.initialize(model=Constant(), config={"optimizer": SGD} | config)
    assert ("`gradient_clipping` is not in the configuration" in capsys.readouterr().out) == is_told


def test_an_engine_tells_its_configuration():
    config = {"gradient_clipping": 0.5, "bf16": {"enabled": True}, "train_batch_size": 6}
    engine, *_ = oxizero.initialize(model=Constant(), config={"optimizer": SGD} | config)
    assert engine.gradient_clipping() == 0.5
    assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (True, False)
    assert engine.dp_world_size == 1


def test_what_is_not_carried_over_says_what_there_is_instead():
    with pytest.raises(AttributeError, match="'init_inference': .*oxizero convert"):
        oxizero.init_inference  # noqa: B018
    with pytest.raises(ImportError):
        from oxizero import PipelineModule  # noqa: F401
