"""Seams: control calls and the parsers of answers (server process; profiles in the worker's)."""

from dspark.host import control
from dspark.host.seam import CHAT, ENGINE, MANAGER, PROFILER, RESPONSES, STREAMER, Seam, Use

SEAMS = (
    *(
        Seam(f"{MANAGER}.{method}", Use.HOOK, parameters)
        for method, (parameters, _) in control.NOT_SERVED.items()
    ),
    Seam(f"{MANAGER}.set_internal_state", Use.HOOK, ("self", "obj")),
    Seam(f"{MANAGER}.slow_down", Use.HOOK, ("self", "obj", "request")),
    Seam(f"{MANAGER}.pause_generation", Use.HOOK, ("self", "obj")),
    Seam(f"{MANAGER}._async_dispatch_to_scheduler", Use.CALL, ("obj",)),
    Seam("managers.io_struct.ContinueGenerationReqInput", Use.CALL),
    Seam(f"{MANAGER}.start_profile", Use.HOOK, ("self", "req")),
    Seam(f"{MANAGER}._execute_profile", Use.HOOK, ("self", "req")),
    Seam(f"{PROFILER}._profile", Use.HOOK, ("self", "recv_req")),
    Seam("managers.io_struct.ProfileReqOutput", Use.CALL, ("success", "message")),
    Seam("managers.io_struct.ProfileReqType.START_PROFILE", Use.CALL),
    Seam(f"{ENGINE}.save_remote_model", Use.HOOK, ("self", "kwargs")),
    Seam(f"{ENGINE}.save_sharded_model", Use.HOOK, ("self", "kwargs")),
    Seam("managers.schedule_batch.Req.check_match_stop_str_prefix", Use.HOOK, ("self",)),
    Seam("managers.schedule_batch.Req.tail_str", Use.CALL),
    Seam(f"{STREAMER}.accept", Use.HOOK, ("self", "req")),
    Seam(f"{RESPONSES}.create_responses", Use.HOOK, ("self", "request", "raw_request")),
    Seam(f"{RESPONSES}.retrieve_responses", Use.HOOK, ("self", "response_id")),
    Seam(f"{RESPONSES}.cancel_responses", Use.HOOK, ("self", "response_id")),
    Seam(
        "entrypoints.openai.protocol.UsageInfo",
        Use.CALL,
        ("prompt_tokens", "completion_tokens", "total_tokens", "reasoning_tokens"),
    ),
    Seam(
        f"{RESPONSES}.responses_stream_generator_non_harmony",
        Use.HOOK,
        (
            "self",
            "request",
            "sampling_params",
            "result_generator",
            "model_name",
            "tokenizer",
            "request_metadata",
            "created_time",
            "require_reasoning",
        ),
    ),
    Seam(
        f"{ENGINE}._launch_detokenizer_subprocesses",
        Use.HOOK,
        ("server_args", "port_args", "run_detokenizer_process_func"),
    ),
    Seam("managers.detokenizer_manager.find_printable_text", Use.TABLE, ("text",)),
    Seam(f"{CHAT}.__init__", Use.HOOK, ("self", "tokenizer_manager", "template_manager")),
    Seam(
        f"{CHAT}._process_tool_call_stream",
        Use.HOOK,
        (
            "self",
            "index",
            "delta",
            "parser_dict",
            "content",
            "request",
            "has_tool_calls",
            "continuous_usage_stats",
        ),
    ),
    Seam(
        f"{CHAT}._process_reasoning_stream",
        Use.HOOK,
        (
            "self",
            "index",
            "delta",
            "reasoning_parser_dict",
            "content",
            "request",
            "finish_reason_type",
        ),
    ),
    Seam("function_call.deepseekv4_detector.DeepSeekV4Detector", Use.BASE),
    Seam("function_call.core_types.StreamingParseResult", Use.CALL, ("normal_text", "calls")),
    Seam("function_call.core_types.ToolCallItem", Use.CALL, ("tool_index", "name", "parameters")),
    Seam("function_call.function_call_parser.FunctionCallParser.ToolCallParserEnum", Use.TABLE),
    Seam(
        "parser.reasoning_parser.DeepSeekV4Detector",
        Use.BASE,
        ("stream_reasoning", "force_reasoning", "continue_final_message", "previous_content"),
    ),
    Seam(
        "parser.reasoning_parser.BaseReasoningFormatDetector._detect_and_parse_impl",
        Use.BASE,
        ("text",),
    ),
    Seam(
        "parser.reasoning_parser.BaseReasoningFormatDetector._parse_streaming_increment_impl",
        Use.BASE,
        ("new_text",),
    ),
    Seam("parser.reasoning_parser.BaseReasoningFormatDetector.finish", Use.BASE),
    Seam(
        "parser.reasoning_parser.StreamingParseResult",
        Use.CALL,
        ("normal_text", "reasoning_text"),
    ),
    Seam("parser.reasoning_parser.ReasoningParser.DetectorMap", Use.TABLE),
    Seam("environ.envs.SGLANG_FORWARD_UNKNOWN_TOOLS", Use.CALL),
)
