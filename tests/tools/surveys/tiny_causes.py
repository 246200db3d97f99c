"""Which classes of transformers 5.23 and 5.24 do not run tiny on the inputs that are known here, and why."""

from __future__ import annotations

CAUSES: dict[str, str] = {
    "Llama4ForConditionalGeneration": "transformers 5.24.0 reads image_outputs of its text model's output, which has none",
    **dict.fromkeys(
        (
            "FastVlmForConditionalGeneration",
            "Gemma3nForConditionalGeneration",
            "PerceptionLMForConditionalGeneration",
        ),
        "it needs timm, which is not installed",
    ),
    **dict.fromkeys(
        (
            "Qwen2_5OmniPreTrainedModelForConditionalGeneration",
            "Qwen3OmniMoePreTrainedModelForConditionalGeneration",
        ),
        "a base class without a forward",
    ),
    **dict.fromkeys(
        (
            "DbrxForCausalLM",
            "MoonshineStreamingForConditionalGeneration",
            "Qwen3OmniMoeForConditionalGeneration",
            "Qwen3OmniMoeTalkerForConditionalGeneration",
        ),
        "its configuration class lacks a field that its model reads",
    ),
    **dict.fromkeys(
        (
            "CanaryForConditionalGeneration",
            "ClvpModelForConditionalGeneration",
            "CohereAsrForConditionalGeneration",
            "DiaForConditionalGeneration",
            "KyutaiSpeechToTextForConditionalGeneration",
            "VoxtralRealtimeForConditionalGeneration",
        ),
        "it needs sound, of sizes that no rule here makes small",
    ),
    **dict.fromkeys(
        (
            "CsmForConditionalGeneration",
            "HiggsAudioV2ForConditionalGeneration",
            "MoshiForConditionalGeneration",
            "MusicgenForConditionalGeneration",
            "MusicgenMelodyForConditionalGeneration",
            "PI0ForConditionalGeneration",
            "Qwen2_5OmniTalkerForConditionalGeneration",
            "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration",
        ),
        "it takes and gives codes of a sound codec, several per place, or robot actions, not text",
    ),
    **dict.fromkeys(
        (
            "DeepseekOcr2ForConditionalGeneration",
            "GlmImageForConditionalGeneration",
            "Granite4VisionForConditionalGeneration",
            "HunYuanVLForConditionalGeneration",
            "PPFormulaNetForConditionalGeneration",
        ),
        "it needs pictures",
    ),
    **dict.fromkeys(
        (
            "Apertus1p5ForConditionalGeneration",
            "Dots3NoteForConditionalGeneration",
            "Ernie4_5_VLMoeForConditionalGeneration",
            "Ernie4_5_VL_MoeForConditionalGeneration",
            "FunAsrNanoForConditionalGeneration",
            "Gemma4AssistantForCausalLM",
            "Gemma4UnifiedAssistantForCausalLM",
            "Glm5NextForConditionalGeneration",
            "GradiumPhononTTSForConditionalGeneration",
            "HYV4VLForConditionalGeneration",
            "Molmo2ForConditionalGeneration",
            "MuseSparkForConditionalGeneration",
            "Nemotron3_5TranscribeForConditionalGeneration",
            "PocketTTSForConditionalGeneration",
        ),
        "its parts check one another's sizes, which no rule here makes small together",
    ),
    **dict.fromkeys(
        (
            "BltForCausalLM",
            "Emu3ForConditionalGeneration",
            "Florence2ForConditionalGeneration",
            "Gemma4UnifiedForConditionalGeneration",
            "JanusForConditionalGeneration",
            "Qwen2_5OmniForConditionalGeneration",
            "VibeVoiceAsrForConditionalGeneration",
            "VibeVoiceForConditionalGeneration",
        ),
        "no rule here makes its default sizes small",
    ),
}
"""By class: why it does not run here."""
