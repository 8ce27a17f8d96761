from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from kvassay.errors import ModelError, UnsupportedModel
from kvassay.record.load import load

from . import tiny


def test_a_local_folder_gives_model_layout_and_identity(tmp_path: Path) -> None:
    tiny.save(tmp_path / "mine", "gemma3")
    loaded = load(tmp_path / "mine")
    assert loaded.tokenizer.decode(loaded.tokenizer("a b").input_ids) == "a b"
    assert [layer.kind for layer in loaded.layout.layers] == ["sliding", "sliding", "full", "sliding"]
    assert not loaded.model.training
    assert next(loaded.model.parameters()).dtype is torch.float32
    assert loaded.device == torch.device("cpu")
    weights = (tmp_path / "mine" / "model.safetensors").read_bytes()
    assert loaded.identity.weights_sha256 == hashlib.sha256(weights).hexdigest()
    assert (loaded.identity.name, loaded.identity.source) == ("mine", "folder")


@pytest.mark.parametrize(
    ("family", "name"), [("step3p7", "Step3p7ForConditionalGeneration"), ("mistral4", "Mistral4ForCausalLM")]
)
def test_text_models_without_an_own_causal_class(family: str, name: str, tmp_path: Path) -> None:
    loaded = load(tiny.save(tmp_path / family, family))
    assert type(loaded.model).__name__ == name
    ids = torch.tensor([tiny.token_ids(9)])
    with torch.inference_mode():
        before = tiny.build(family, attention="sdpa", native=4096)(ids).logits
        torch.testing.assert_close(loaded.model(ids).logits, before, rtol=0, atol=1e-5)


def test_the_tokenizers_hash_follows_its_vocabulary(tmp_path: Path) -> None:
    tiny.save(tmp_path)
    first = load(tmp_path).identity.tokenizer_sha256
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert load(tmp_path).identity.tokenizer_sha256 != first


def test_loading_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.save(tmp_path)
    capfd.readouterr()
    load(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_weights_can_be_loaded_narrower(tmp_path: Path) -> None:
    tiny.save(tmp_path)
    assert next(load(tmp_path, dtype=torch.float16).model.parameters()).dtype is torch.float16


def test_an_embedded_model_that_is_not_here_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASSAY_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"run: kvassay models fetch smollm2-135m$"):
        load("smollm2-135m")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm-135m", r"no model is called 'smollm-135m' \(did you mean 'smollm2-135m'\?\)"),
        ("not a/model id", "neither a folder, a Hugging Face id nor an embedded model"),
    ],
)
def test_wrong_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(name)


def test_a_folder_without_config_or_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)
    tiny.save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load(tmp_path)


def test_a_hub_model_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def offline(*args: object, **options: object) -> None:
        raise OSError("We couldn't connect to the hub\nand more lines")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    with pytest.raises(ModelError) as caught:
        load("someone/some-model")
    assert "\n" not in str(caught.value)
    assert "'someone/some-model' cannot be had from the Hugging Face hub (We couldn't connect" in str(caught.value)
    assert "smollm2-135m" in str(caught.value)


def test_a_model_with_recurrent_state_is_refused(tmp_path: Path) -> None:
    import transformers

    transformers.MambaConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel):
        load(tmp_path)


@pytest.mark.parametrize("device", ["xpu", "nonsense", "cuda:99"])
def test_devices_that_are_not_there_are_refused(device: str) -> None:
    with pytest.raises(ModelError, match=f"device '{device}'"):
        load("smollm2-135m", device=device)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ModelError, match="dtype 'int8' is not one of float32, float16, bfloat16"):
        load("smollm2-135m", dtype="int8")
