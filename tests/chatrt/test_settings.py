from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.errors import SettingsError
from chatrt.params import SamplingParams
from chatrt.settings import SAMPLING_NAMES, Resolved, Settings, Sourced, describe, load, variable

if TYPE_CHECKING:
    from collections.abc import Mapping

NOWHERE = Path("/nowhere/config.toml")


def from_toml(
    folder: Path,
    text: str,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return load(flags or {}, environ or {}, path)


def test_without_any_source_every_value_is_the_default() -> None:
    resolved = load({}, {}, NOWHERE)
    assert resolved.settings == Settings()
    assert {resolved.origin(name) for name in describe()} == {"default"}


def test_every_default_is_a_value_that_the_setting_itself_allows() -> None:
    for name, setting in describe().items():
        default = getattr(Settings(), name)
        assert default is None or setting.read(default) == default
        assert setting.doc


def test_a_flag_wins_over_a_variable_and_that_over_the_file(tmp_path: Path) -> None:
    text = "port = 1\nmodel = 'file'\nthreads = 3\n"
    environ = {"CHATRT_PORT": "2", "CHATRT_MODEL": "variable"}
    resolved = from_toml(tmp_path, text, {"port": 3, "model": None}, environ)
    settings = resolved.settings
    assert (settings.port, settings.model, settings.threads) == (3, "variable", 3)
    assert resolved.origin("port") == "flag"
    assert resolved.origin("model") == "CHATRT_MODEL"
    assert resolved.origin("threads") == "config.toml"
    assert resolved.origin("host") == "default"


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load({}, {"CHATRT_PORT": ""}, NOWHERE).origin("port") == "default"


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("kv_memory_bytes", "4GiB", 4 << 30),
        ("kv_memory_bytes", "1.5 kb", 1500),
        ("kv_memory_bytes", "4096", 4096),
        ("idle_exit_s", "30m", 1800.0),
        ("idle_exit_s", "90", 90.0),
        ("drain_s", "500ms", 0.5),
        ("drain_s", "2h", 7200.0),
        ("store", "off", False),
        ("insecure_no_auth", "Yes", True),
        (
            "allow_origin",
            "https://a.example, https://b.example",
            ("https://a.example", "https://b.example"),
        ),
        ("dtype", "BFloat16", "bfloat16"),
        ("max_gap_ms", "none", None),
        ("threads", "none", None),
        ("speculation", "off", "off"),
        ("api_key_file", "/keys", Path("/keys")),
    ],
)
def test_a_variable_is_read_in_its_units(name: str, written: str, value: object) -> None:
    resolved = load({}, {variable(name): written}, NOWHERE)
    assert getattr(resolved.settings, name) == value
    assert resolved.origin(name) == variable(name)


def test_toml_values_keep_their_types(tmp_path: Path) -> None:
    text = "store = false\nallow_host = ['a', 'b']\nkv_memory_fraction = 0.5\ndrain_s = '1m'\n"
    settings = from_toml(tmp_path, text).settings
    assert settings.store is False
    assert settings.allow_host == ("a", "b")
    assert (settings.kv_memory_fraction, settings.drain_s) == (0.5, 60.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "eighty"),
        ("port", 80.5),
        ("port", True),
        ("model", "  "),
        ("model", 3),
        ("kv_memory_fraction", 0),
        ("kv_memory_fraction", "1.1"),
        ("kv_memory_fraction", "nan"),
        ("kv_memory_bytes", "4 parsecs"),
        ("kv_memory_bytes", 0),
        ("idle_exit_s", "-5"),
        ("idle_exit_s", 10**400),
        ("page_size", 0),
        ("speculation", "oracle"),
        ("store", "maybe"),
        ("allow_origin", [1]),
        ("threads", "0"),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_what_is(name: str, value: object) -> None:
    with pytest.raises(SettingsError) as caught:
        load({name: value}, {}, NOWHERE)
    message = caught.value.message
    assert message.startswith(f"{name} is {value!r} (from --")
    assert message.endswith("it must be " + describe()[name].allowed)
    assert caught.value.param == name


def test_the_error_says_which_source_the_value_came_from(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"port is 'x' \(from CHATRT_PORT\)"):
        load({}, {"CHATRT_PORT": "x"}, NOWHERE)
    with pytest.raises(SettingsError, match=r"from --idle-exit"):
        load({"idle_exit_s": "x"}, {}, NOWHERE)
    with pytest.raises(SettingsError, match=r"port is 'x' \(from .*config\.toml\)"):
        from_toml(tmp_path, "port = 'x'")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("prot = 1", "prot is not a setting"),
        ("[sampling]\nheat = 1.0", "sampling.heat is not a setting"),
        ("[sampling]\ntemperature = 3.0", "sampling.temperature is 3.0, it must be in"),
        ("[sampling]\ntemperature = 'hot'", "sampling.temperature is 'hot'"),
        ("[sampling]\ntop_k = 1.5", "sampling.top_k is 1.5 .* a whole number"),
        ("sampling = 3", "sampling is 3 .* a table"),
        ("models = 3", "models is 3"),
        ("[models.m]\nsize = 3", 'models."m".size is not a setting'),
        ("[models.m.sampling]\ntop_p = 0", 'models."m".sampling.top_p is 0'),
        ("port = ", "is not valid TOML"),
    ],
)
def test_a_bad_config_file_is_refused_with_the_place(
    tmp_path: Path, text: str, sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence) as caught:
        from_toml(tmp_path, text)
    assert "config.toml" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_config_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(SettingsError, match="cannot be read"):
        load({}, {}, tmp_path / "config.toml")
    (tmp_path / "latin.toml").write_bytes(b"model = '\xe9'")
    with pytest.raises(SettingsError, match="cannot be read"):
        load({}, {}, tmp_path / "latin.toml")


def test_sampling_comes_from_the_models_table_then_the_general_one_then_the_model(
    tmp_path: Path,
) -> None:
    text = "[sampling]\ntemperature = 0.5\ntop_k = 5\n[models.'m'.sampling]\ntemperature = 0.25\n"
    resolved = from_toml(tmp_path, text)
    own = {"temperature": 0.1, "top_k": 1, "top_p": 0.9, "min_p": None, "eos_token_id": 2}
    found = resolved.sampling_defaults("m", own)
    assert found["temperature"] == Sourced(0.25, "config.toml")
    assert found["top_k"] == Sourced(5, "config.toml")
    assert found["top_p"] == Sourced(0.9, "model")
    assert found["min_p"] == Sourced(0.0, "default")
    assert tuple(found) == SAMPLING_NAMES
    assert resolved.sampling_defaults("other", own)["temperature"] == Sourced(0.5, "config.toml")


def test_sampling_names_are_parameters_of_a_turn() -> None:
    names = {one.name for one in dataclasses.fields(SamplingParams)}
    assert set(SAMPLING_NAMES) <= names


def test_settings_cannot_be_changed_after_loading() -> None:
    settings: Any = load({}, {}, NOWHERE).settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.port = 1


def test_settings_and_paths_import_no_torch() -> None:
    code = "import sys, chatrt.settings, chatrt.paths; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
