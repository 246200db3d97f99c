"""Folders that `save_pretrained` of transformers writes are read as `from_pretrained`, the judge, reads them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from nemo_like import parallelize
from nemo_like.distributed.weights.materialize import materialize
from tests.checks import assert_bitwise, on_meta, seeded, whole
from tests.models.tiny import llama, tokens
from tests.tools.surveys.tiny_models import ATTEMPTS, build_tiny
from tests_distributed.spawn import on_ranks

FAMILIES = [
    "LlavaForConditionalGeneration",
    "MixtralForCausalLM",
    "SwinModel",
    "NemotronHForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "ViTForImageClassification",
    "CLIPModel",
    "Mamba2ForCausalLM",
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "GPT2LMHeadModel",
    "BertForMaskedLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "JambaForCausalLM",
    "FalconForCausalLM",
    "Phi3ForCausalLM",
    "BloomForCausalLM",
]


def _tiny(name: str) -> nn.Module:
    for without in ATTEMPTS[:-1]:
        try:
            return build_tiny(name, without)
        except ValueError:
            continue
    return build_tiny(name, ATTEMPTS[-1])


def _on_meta(eager: nn.Module) -> nn.Module:
    return on_meta(type(eager), eager.config).train()


@pytest.mark.few(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_is_read_as_from_pretrained_reads_it(name: str, tmp_path: Path) -> None:
    eager = _tiny(name)
    eager.save_pretrained(tmp_path)
    wanted = type(eager).from_pretrained(tmp_path, dtype=torch.float32)
    model = materialize(_on_meta(eager), checkpoint=tmp_path, seed=0)
    assert_bitwise(model.state_dict(), wanted.state_dict())
    assert_bitwise(dict(model.named_buffers()), dict(wanted.named_buffers()))


@on_ranks(2, timeout=100)
def test_ranks_read_their_shards_of_renamed_and_of_merged_tensors(rank: int, world_size: int, tmp_path: Path) -> None:
    for name in ("LlavaForConditionalGeneration", "MixtralForCausalLM"):
        eager = seeded(_tiny, name)
        if rank == 0:
            eager.save_pretrained(tmp_path / name)
        torch.distributed.barrier()
        model = parallelize(_on_meta(eager), strategy="fsdp2", ac="full", device="cpu")
        materialize(model, checkpoint=tmp_path / name)
        assert_bitwise({n: whole(p).detach() for n, p in model.named_parameters()}, dict(eager.named_parameters()))


# --------------------------------------------------------------------------------------------------------------- PEFT


def _adapted(base: nn.Module, *more: str, **options: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", *more], **options))


@pytest.mark.parametrize("options", [{}, {"init_lora_weights": "gaussian"}, {"modules_to_save": ["lm_head"]}])
def test_lora_on_a_meta_base(options: dict[str, object], tmp_path: Path) -> None:
    """The judge: PEFT on `from_pretrained`; its random factors by their spread, all else to the bit."""
    llama().save_pretrained(tmp_path)
    torch.manual_seed(0)
    eager = _adapted(type(llama()).from_pretrained(tmp_path), "embed_tokens", **options)
    meta = on_meta(lambda: _adapted(llama(), "embed_tokens", **options))
    model = materialize(parallelize(meta, "fsdp2", "full", device="cpu"), checkpoint=tmp_path, seed=0)
    for name, wanted in eager.named_parameters():
        got = model.get_parameter(name)
        assert got.requires_grad == wanted.requires_grad
        if wanted.requires_grad and wanted.any() and "lora_" in name:
            assert 0.6 < got.std() / wanted.std() < 1.6, name
        else:
            assert torch.equal(got, wanted), name
    ids = tokens()
    assert torch.equal(model(input_ids=ids).logits, eager(input_ids=ids).logits)  # B is 0


@pytest.mark.long  # the same code as on one process and as the shards above
@on_ranks(2, timeout=100)
def test_lora_on_a_meta_base_on_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    eager = seeded(llama)
    if rank == 0:
        eager.save_pretrained(tmp_path)
    torch.distributed.barrier()
    single, model = _meta_lora(), parallelize(_meta_lora(), strategy="fsdp2", ac="full", device="cpu")
    for each in (single, model):
        materialize(each, checkpoint=tmp_path, seed=3)
    assert_bitwise({n: whole(p).detach() for n, p in model.named_parameters()}, dict(single.named_parameters()))


def _meta_lora() -> nn.Module:
    return on_meta(lambda: _adapted(llama(), "embed_tokens"))


@pytest.mark.parametrize(
    ("options", "named"),
    [({"use_dora": True}, "lora_magnitude_vector"), ({"init_lora_weights": "pissa"}, "pissa")],
)
def test_adapters_that_begin_from_the_base_are_refused(options: dict[str, object], named: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    base = on_meta(llama)
    try:
        model = on_meta(_adapted, base, **options)
    except (ValueError, RuntimeError, NotImplementedError):
        pytest.skip("PEFT itself refuses it on the meta device")
    with pytest.raises(ValueError, match=named):
        materialize(model, checkpoint=tmp_path)
    assert all(p.is_meta for n, p in model.named_parameters() if "lora_magnitude" not in n)
