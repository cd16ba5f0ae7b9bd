"""Seams: arguments and requests (launcher process)."""

from dspark.host.seam import MANAGER, Seam, Use

SEAMS = (
    Seam("server_args.ServerArgs.__post_init__", Use.HOOK, ("self",)),
    Seam("server_args.ServerArgs.add_cli_args", Use.HOOK, ("parser",)),
    Seam("server_args.ServerArgs.__repr__", Use.HOOK, ("self",)),
    Seam("server_args.prepare_server_args", Use.CALL, ("argv",)),
    Seam("arg_groups.speculative_hook._handle_dspark", Use.HOOK, ("server_args",)),
    Seam("entrypoints.http_server.ORJSONRequest.json", Use.HOOK, ("self",)),
    Seam("entrypoints.http_server.get_global_state", Use.CALL),
    Seam("entrypoints.http_server.app", Use.TABLE),
    Seam("sampling.custom_logit_processor.CustomLogitProcessor.from_str", Use.CALL, ("json_str",)),
    Seam(
        "entrypoints.ollama.serving.OllamaServing.handle_chat",
        Use.HOOK,
        ("self", "request", "raw_request"),
    ),
    Seam(
        "entrypoints.ollama.serving.OllamaServing.handle_generate",
        Use.HOOK,
        ("self", "request", "raw_request"),
    ),
    *(
        Seam(
            f"entrypoints.ollama.serving.OllamaServing.{method}",
            Use.HOOK,
            ("self", "gen_request", "raw_request", "model_name"),
        )
        for method in ("_stream_chat_response", "_stream_generate_response")
    ),
    Seam(
        "managers.tokenizer_manager.TokenizerManager.generate_request",
        Use.HOOK,
        ("self", "obj", "request"),
    ),
    Seam(
        "entrypoints.openai.serving_chat.OpenAIServingChat._validate_request",
        Use.HOOK,
        ("self", "request"),
    ),
    Seam(
        "entrypoints.ollama.serving.OllamaServing._convert_options_to_sampling_params",
        Use.HOOK,
        ("self", "options"),
    ),
    Seam(
        f"{MANAGER}._validate_one_request",
        Use.HOOK,
        ("self", "obj", "input_ids"),
    ),
)
