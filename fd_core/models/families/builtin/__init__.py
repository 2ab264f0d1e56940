"""The built-in families of models, offered through the same hook as those of plugins."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_models() -> list[Entry]:
    """Offer the built-in families."""
    families = "fd_core.models.families.builtin"
    encoders, latent = "fd_core.models.families.encoders", "fd_core.models.families.latent"
    recurrent, images = "fd_core.models.families.recurrent", "fd_core.models.families.images"
    return [
        Entry("bert", f"{encoders}.bert:Bert", "BERT, MiniLM, BGE, GTE and E5"),
        Entry("cohere2", f"{families}.cohere:Cohere2", "Command R7B and Command A"),
        Entry("deepseek_v2", f"{latent}.deepseek:DeepSeekV2", "DeepSeek-V2 and V2.5"),
        Entry("deepseek_v3", f"{latent}.deepseek:DeepSeekV3", "DeepSeek-V3 and R1"),
        Entry("distilbert", f"{encoders}.bert:DistilBert", "DistilBERT"),
        Entry("ernie4_5", f"{families}.ernie:Ernie", "ERNIE 4.5"),
        Entry("ernie4_5_moe", f"{families}.ernie:ErnieMoe", "ERNIE 4.5, mixtures of experts"),
        Entry("ernie4_5_vl_moe", f"{images}.ernie:ErnieVl", "ERNIE 4.5 VL, with images"),
        Entry("exaone4", f"{families}.exaone:Exaone4", "EXAONE 4"),
        Entry("gemma", f"{families}.gemma:Gemma", "Gemma 1"),
        Entry("gemma2", f"{families}.gemma:Gemma2", "Gemma 2"),
        Entry("gemma3", f"{families}.gemma:Gemma3", "Gemma 3, text"),
        Entry("gemma3_embedding", f"{encoders}.gemma:EmbeddingGemma", "EmbeddingGemma"),
        Entry("gemma3_images", f"{images}.gemma:Gemma3WithImages", "Gemma 3, with images"),
        Entry("glm", f"{families}.glm:Glm", "GLM-4-9B"),
        Entry("glm4", f"{families}.glm:Glm4", "GLM-4-0414, GLM-Z1"),
        Entry("glm4_moe", f"{families}.glm:Glm4Moe", "GLM-4.5 and GLM-4.6"),
        Entry("glm4_moe_lite", f"{latent}.deepseek:Glm4MoeLite", "GLM-4.7-Flash"),
        Entry("idefics3", f"{images}.idefics:Idefics3", "Idefics 3 and SmolVLM, with images"),
        Entry("gpt_oss", f"{families}.experts:GptOss", "gpt-oss"),
        Entry("granite", f"{families}.granite:Granite", "Granite 3"),
        Entry("granite_moe", f"{families}.granite:GraniteMoe", "Granite 3, mixtures of experts"),
        Entry("granite_moe_hybrid", f"{recurrent}.mamba:GraniteHybrid", "Granite 4"),
        Entry("hunyuan", f"{families}.hunyuan:HunyuanDense", "Hunyuan, dense"),
        Entry("hunyuan_moe", f"{families}.hunyuan:HunyuanMoe", "Hunyuan, mixtures of experts"),
        Entry("internlm3", f"{families}.llama:InternLm3", "InternLM 3"),
        Entry("lfm2", f"{recurrent}.lfm:Lfm2", "LFM2"),
        Entry("llama", f"{families}.llama:Llama", "Llama 2 and 3, and models with this architecture"),
        Entry("llama4", f"{families}.llama:Llama4", "Llama 4, text"),
        Entry("llava_next", f"{images}.llava:LlavaNext", "LLaVA-NeXT, with images"),
        Entry("llava_onevision", f"{images}.llava:LlavaOnevision", "LLaVA-OneVision, with images"),
        Entry("minimax_m2", f"{families}.experts:MiniMaxM2", "MiniMax-M2"),
        Entry("minicpm3", f"{latent}.minicpm:MiniCpm3", "MiniCPM3"),
        Entry("mistral", f"{families}.llama:Mistral", "Mistral"),
        Entry("mixtral", f"{families}.experts:Mixtral", "Mixtral"),
        Entry("modernbert", f"{encoders}.modernbert:ModernBert", "ModernBERT"),
        Entry("nemotron", f"{families}.layer_norms:Nemotron", "Nemotron 4 and Minitron"),
        Entry("nemotron_h", f"{recurrent}.mamba:NemotronH", "Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano"),
        Entry("olmo2", f"{families}.olmo:Olmo2", "OLMo 2"),
        Entry("olmo3", f"{families}.olmo:Olmo3", "OLMo 3"),
        Entry("olmoe", f"{families}.olmo:Olmoe", "OLMoE"),
        Entry("paddleocr_vl", f"{images}.paddle:PaddleOcrVl", "PaddleOCR-VL, with images"),
        Entry("phi3", f"{families}.phi:Phi3", "Phi-3, Phi-4 and Phi-4-mini"),
        Entry("qwen2_vl", f"{images}.qwen:Qwen2Vl", "Qwen2-VL, with images"),
        Entry("qwen2_5_vl", f"{images}.qwen:Qwen25Vl", "Qwen2.5-VL, with images"),
        Entry("qwen3_vl", f"{images}.qwen3:Qwen3Vl", "Qwen3-VL, with images"),
        Entry("qwen3_vl_moe", f"{images}.qwen3:Qwen3VlMoe", "Qwen3-VL, mixtures of experts, with images"),
        Entry("qwen2", f"{families}.qwen:Qwen2", "Qwen2 and Qwen2.5"),
        Entry("qwen2_moe", f"{families}.qwen:Qwen2Moe", "Qwen1.5 and Qwen2, mixtures of experts"),
        Entry("qwen3", f"{families}.qwen:Qwen3", "Qwen3"),
        Entry("qwen3_moe", f"{families}.qwen:Qwen3Moe", "Qwen3, mixtures of experts"),
        Entry("qwen3_5", f"{recurrent}.qwen:Qwen35", "Qwen3.5, text"),
        Entry("qwen3_5_moe", f"{recurrent}.qwen:Qwen35Moe", "Qwen3.5, mixtures of experts, text"),
        Entry("qwen3_5_vl", f"{images}.qwen3:Qwen35Vl", "Qwen3.5, with images"),
        Entry("qwen3_5_vl_moe", f"{images}.qwen3:Qwen35VlMoe", "Qwen3.5, mixtures of experts, with images"),
        Entry("qwen3_next", f"{recurrent}.qwen:Qwen3Next", "Qwen3-Next"),
        Entry("roberta", f"{encoders}.bert:Roberta", "RoBERTa"),
        Entry("seed_oss", f"{families}.llama:SeedOss", "Seed-OSS"),
        Entry("smollm3", f"{families}.llama:SmolLm3", "SmolLM3"),
        Entry("stablelm", f"{families}.layer_norms:StableLm", "StableLM 2"),
        Entry("starcoder2", f"{families}.layer_norms:StarCoder2", "StarCoder2"),
        Entry("xlm_roberta", f"{encoders}.bert:XlmRoberta", "XLM-RoBERTa, BGE-M3 and multilingual E5"),
    ]
