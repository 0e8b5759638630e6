"""Schemes, presets, layer_config and who wins."""

import json
from pathlib import Path
from typing import Any

import pytest

from autoround_fp8.errors import ConfigError
from autoround_fp8.schemes import (
    PRESETS,
    UNQUANTIZED,
    QuantizationScheme,
    SchemeResolver,
    matches_layer,
    parse_layer_config,
    parse_scheme,
    preset_name_to_scheme,
    validate_scheme,
)

PER_TENSOR_SCHEME = QuantizationScheme(group_size=0)


class TestQuantizationScheme:
    def test_works_as_a_dict(self) -> None:
        scheme = QuantizationScheme()
        assert scheme["bits"] == 8
        assert scheme.get("act_dynamic") is False
        assert scheme.get("nothing", 7) == 7
        assert dict(scheme.items()) == dict(scheme) == scheme.to_dict()
        assert list(scheme.keys()) == list(scheme)
        assert len(scheme) == len(list(scheme.values())) == 9
        assert "group_size" in scheme
        assert "fmt" not in scheme

    def test_writes_through_both_ways(self) -> None:
        scheme = QuantizationScheme()
        scheme["group_size"] = 0
        assert scheme.group_size == 0
        assert scheme == PER_TENSOR_SCHEME

    def test_unknown_names_raise_as_in_a_dict(self) -> None:
        scheme = QuantizationScheme()
        with pytest.raises(KeyError):
            scheme["fmt"]
        with pytest.raises(KeyError):
            scheme["fmt"] = "e4m3"

    def test_from_dict_names_an_unknown_field(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown scheme field 'bit' \(value 8\); choose from bits"):
            QuantizationScheme.from_dict({"bit": 8})

    def test_from_dict_is_the_inverse_of_to_dict(self) -> None:
        assert QuantizationScheme.from_dict(UNQUANTIZED.to_dict()) == UNQUANTIZED
        assert not UNQUANTIZED.is_quantized


class TestPresets:
    @pytest.mark.parametrize("name", ["FP8_STATIC", "fp8_static", "'FP8_STATIC'", '"Fp8_Static"', " fp8_static "])
    def test_any_case_and_quotes(self, name: str) -> None:
        assert preset_name_to_scheme(name) == QuantizationScheme()

    def test_per_tensor(self) -> None:
        assert parse_scheme("fp8_static_tensor") == PER_TENSOR_SCHEME

    def test_dynamic_inputs_have_a_scale_per_token(self) -> None:
        scheme = parse_scheme("fp8_dynamic")
        assert (scheme.act_dynamic, scheme.act_group_size, scheme.group_size) == (True, -1, -1)
        assert parse_scheme({"act_dynamic": True, "act_group_size": -1}) == scheme

    def test_fp8_is_another_word_for_fp(self) -> None:
        assert parse_scheme({"data_type": "fp8", "act_data_type": "fp8"}) == QuantizationScheme()

    def test_unknown_name_lists_the_presets(self) -> None:
        with pytest.raises(ConfigError, match=r"'W4A16'.*FP8_STATIC, FP8_STATIC_TENSOR"):
            parse_scheme("W4A16")

    def test_each_call_gives_an_own_copy(self) -> None:
        preset_name_to_scheme("FP8_STATIC")["bits"] = 4
        assert PRESETS["FP8_STATIC"].bits == 8


class TestValidation:
    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"bits": 4}, r"bits \(4\)"),
            ({"bits": "8"}, r"bits \('8'\)"),
            ({"group_size": 128}, r"group_size \(128\).*-1 or 0"),
            ({"group_size": False}, r"group_size \(False\)"),
            ({"sym": False}, r"sym \(False\)"),
            ({"sym": 1}, r"sym \(1\)"),
            ({"data_type": "int"}, r"data_type \('int'\)"),
            ({"act_bits": 16}, r"act_bits \(16\)"),
            ({"act_group_size": -1}, r"act_group_size \(-1\)"),
            ({"act_group_size": 64}, r"act_group_size \(64\)"),
            ({"act_dynamic": True}, r"act_dynamic \(True\)"),
            ({"bits": 16, "act_bits": 8}, r"bits \(16\)"),
        ],
    )
    def test_unsupported_fields_are_named(self, fields: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            parse_scheme(fields)

    def test_says_where(self) -> None:
        with pytest.raises(ConfigError, match="of layer 'lm_head'"):
            validate_scheme(QuantizationScheme(bits=4), "layer 'lm_head'")

    def test_16_bits_alone_leave_a_layer_as_it_is(self) -> None:
        assert parse_scheme({"bits": 16}) == UNQUANTIZED

    @pytest.mark.parametrize("value", [None, 8, ["FP8_STATIC"]])
    def test_other_types_are_refused(self, value: Any) -> None:
        with pytest.raises(ConfigError, match=type(value).__name__):
            parse_scheme(value)


class TestLayerConfig:
    ENTRIES: dict[str, Any] = {"k_proj": "fp8_static_tensor", "lm_head": {"bits": 16}}  # noqa: RUF012
    SCHEMES = {"k_proj": PER_TENSOR_SCHEME, "lm_head": UNQUANTIZED}  # noqa: RUF012

    def test_mapping_and_json_text_and_file_agree(self, tmp_path: Path) -> None:
        path = tmp_path / "layers.json"
        path.write_text(json.dumps(self.ENTRIES))
        assert parse_layer_config(self.ENTRIES) == self.SCHEMES
        assert parse_layer_config(json.dumps(self.ENTRIES)) == self.SCHEMES
        assert parse_layer_config(str(path)) == self.SCHEMES

    @pytest.mark.parametrize("nothing", [None, "", {}, "{}"])
    def test_nothing(self, nothing: Any) -> None:
        assert parse_layer_config(nothing) == {}

    @pytest.mark.parametrize("text", ["{bad", '{"a": }'])
    def test_bad_json(self, text: str) -> None:
        with pytest.raises(ConfigError, match="not valid JSON"):
            parse_layer_config(text)

    @pytest.mark.parametrize("text", ["nowhere.json", "a\0b", "[1]"])
    def test_neither_json_nor_file(self, text: str) -> None:
        with pytest.raises(ConfigError, match="neither JSON text nor a readable file"):
            parse_layer_config(text)

    def test_binary_file(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_bytes(b"\xff\xfe\x80")
        with pytest.raises(ConfigError, match="readable file"):
            parse_layer_config(str(tmp_path / "x.json"))

    def test_a_list_in_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text("[1]")
        with pytest.raises(ConfigError, match="must map layer names"):
            parse_layer_config(str(tmp_path / "x.json"))

    def test_a_bad_entry_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"entry 'k_proj': bits \(4\)"):
            parse_layer_config({"k_proj": {"bits": 4}})


DOWN_1, DOWN_10 = "model.layers.1.mlp.down_proj", "model.layers.10.mlp.down_proj"
K_0 = "model.layers.0.self_attn.k_proj"


class TestMatchesLayer:
    @pytest.mark.parametrize(
        ("pattern", "fqn"),
        [
            ("layers.1", DOWN_1),
            ("layers.1.", DOWN_1),
            ("layers.*.mlp", DOWN_10),
            ("model.layers.*", K_0),
            ("*k_proj", K_0),
            ("*_proj", K_0),
            ("self_attn.*", K_0),
            ("*", "lm_head"),
            (".*k_proj", K_0),
            (".*self_attn.*", K_0),
            (r"layers\.(0|1)\.", DOWN_1),
            ("down_proj$", DOWN_1),
            (r"re:.*\.down_proj$", DOWN_1),
            (K_0, K_0),
        ],
    )
    def test_names_the_layer(self, pattern: str, fqn: str) -> None:
        assert matches_layer(pattern, fqn)

    @pytest.mark.parametrize(
        ("pattern", "fqn"),
        [
            ("layers.1", DOWN_10),
            ("proj", K_0),
            ("layers.*.mlp", "model.layers.3.self_attn.mlp"),
            (r"layers\.(0|1)\.", DOWN_10),
            ("re:down_proj", DOWN_1),
            ("", K_0),
            (".", K_0),
        ],
    )
    def test_does_not_name_the_layer(self, pattern: str, fqn: str) -> None:
        assert not matches_layer(pattern, fqn)

    @pytest.mark.parametrize("pattern", ["(", "re:[", "a(?P<"])
    def test_bad_regular_expression(self, pattern: str) -> None:
        with pytest.raises(ConfigError, match="not a valid regular expression"):
            matches_layer(pattern, K_0)


class TestSchemeResolver:
    def test_default(self) -> None:
        assert SchemeResolver(PER_TENSOR_SCHEME).resolve(K_0) == PER_TENSOR_SCHEME

    def test_ignore_wins_over_everything(self) -> None:
        resolver = SchemeResolver(QuantizationScheme(), {K_0: PER_TENSOR_SCHEME}, ("k_proj",))
        assert resolver.resolve(K_0) == UNQUANTIZED
        assert resolver.is_ignored(K_0)
        assert not resolver.is_ignored(DOWN_1)

    def test_last_matching_pattern_wins(self) -> None:
        layers = {"k_proj": UNQUANTIZED, "self_attn": PER_TENSOR_SCHEME}
        assert SchemeResolver(QuantizationScheme(), layers).resolve(K_0) == PER_TENSOR_SCHEME
        assert SchemeResolver(QuantizationScheme(), dict(reversed(layers.items()))).resolve(K_0) == UNQUANTIZED

    def test_exact_name_wins_over_later_patterns(self) -> None:
        resolver = SchemeResolver(QuantizationScheme(), {K_0: UNQUANTIZED, "self_attn": PER_TENSOR_SCHEME})
        assert resolver.resolve(K_0) == UNQUANTIZED
        assert resolver.unused_patterns() == []

    def test_unused_patterns_are_remembered(self) -> None:
        resolver = SchemeResolver(QuantizationScheme(), {"kproj": UNQUANTIZED, "down_proj": UNQUANTIZED}, ("lm_haed",))
        resolver.resolve(DOWN_1)
        assert resolver.unused_patterns() == ["lm_haed", "kproj"]
