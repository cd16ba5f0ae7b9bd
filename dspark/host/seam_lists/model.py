"""Seams: model and attention (worker process)."""

from dspark.host.seam import LOADER, Seam, Use

SEAMS = (
    Seam(f"{LOADER}._get_weights_iterator", Use.HOOK, ("self", "source")),
    Seam(
        f"{LOADER}._prepare_weights",
        Use.CALL,
        ("model_name_or_path", "revision", "fall_back_to_pt"),
    ),
    Seam("layers.attention.attention_registry.ATTENTION_BACKENDS", Use.TABLE),
    Seam("models.registry.ModelRegistry.register", Use.CALL, ("package_name", "overwrite")),
    Seam("models.registry.ModelRegistry.resolve_model_cls", Use.CALL, ("architectures",)),
    Seam("configs.model_config.is_deepseek_v4", Use.CALL, ("config",)),
    Seam(
        "layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata",
        Use.BASE,
        ("forward_batch",),
    ),
    Seam(
        "layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_out_graph",
        Use.BASE,
        ("forward_batch", "in_capture"),
    ),
    Seam(
        "layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_in_graph",
        Use.BASE,
        ("forward_batch",),
    ),
    Seam("layers.logits_processor.LogitsProcessor", Use.BASE, ("config", "skip_all_gather")),
    Seam(
        "layers.logits_processor.LogitsProcessor._get_logits",
        Use.BASE,
        ("hidden_states", "lm_head", "logits_metadata"),
    ),
    Seam(
        "layers.logits_processor.LogitsProcessor.forward",
        Use.CALL,
        ("input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states"),
    ),
    Seam("model_executor.forward_context.get_attn_backend", Use.CALL),
    Seam("distributed.get_tp_group", Use.CALL),
)
