import pickle
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from search_spaces.study.engine import NOT_OF_ONE_ENGINE, Engine, EngineOptions

# A value for each type of option that is no option's default.
OTHER_VALUES = (7, "other", True)
OPTIONS = {name: field for name, field in Engine.model_fields.items() if name not in NOT_OF_ONE_ENGINE}


def another(name: str, field: FieldInfo) -> Any:
    """A valid value of the option that is not its default; the default if no other value is valid."""
    choices = getattr(field.annotation, "__args__", ())
    for value in (*reversed(choices), *OTHER_VALUES):
        try:
            if getattr(Engine(**{name: value}), name) == value != field.default:
                return value
        except ValueError:
            continue
    return field.default


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_the_study_file_reaches_the_engine(name: str) -> None:
    value = another(name, OPTIONS[name])
    assert value != OPTIONS[name].default, f"no other value found for {name}"
    options = Engine(**{name: value}).options
    assert getattr(options, name) == value
    assert options.document()[name] == ("vllm" if name == "backend" else value), "backends have no keys of their own"


def test_verify_options_share_engines() -> None:
    """Studies that differ only in their verification options can share engines."""
    options = Engine(replicas=3, verify=False, max_model_len=50).options
    assert options == Engine(max_model_len=50).options == EngineOptions(max_model_len=50)
    assert not NOT_OF_ONE_ENGINE & options.document().keys()
    assert set(NOT_OF_ONE_ENGINE) == {"replicas", "verify"}


def test_what_only_programs_set_is_no_key_of_the_study_file() -> None:
    options = EngineOptions(threads=2, seed=3)
    assert {"threads": 2, "seed": 3}.items() <= options.document().items()
    own = EngineOptions.model_fields.keys() - Engine.model_fields.keys()
    assert own == {"threads", "seed", "max_layers", "gpu_share_left", "merges_parts"}
    newer = {"max_layers", "gpu_share_left", "merges_parts"}
    assert not newer & options.document().keys(), "engines without are those of before"
    assert options.model_copy(update={"max_layers": 9}).document() == {**options.document(), "max_layers": 9}
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(ValueError, match="threads"):
        Engine.model_validate({"threads": 2})
