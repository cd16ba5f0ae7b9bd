"""Hooks: how answers are read and sent."""

import functools
from typing import Any

from dspark.host import arguments
from dspark.host.ours import is_ours, manager_is_ours


def launch_detokenizer(original, engine, server_args, port_args, run_detokenizer_process_func):
    """Engine._launch_detokenizer_subprocesses: a process without plugins starts with ours."""
    if arguments.is_deepseek_v4(server_args):
        from dspark.host import detokenizer

        run_detokenizer_process_func = functools.partial(
            detokenizer.run, run_detokenizer_process_func
        )
    return original(
        engine,
        server_args=server_args,
        port_args=port_args,
        run_detokenizer_process_func=run_detokenizer_process_func,
    )


def serve_chat(original, serving, tokenizer_manager, template_manager):
    """OpenAIServingChat.__init__ is where a process first needs the parsers of answers."""
    if manager_is_ours(tokenizer_manager):
        from dspark.host import parsers

        parsers.install()
    original(serving, tokenizer_manager, template_manager)


def finish_tool_calls(original, serving, *args, **kwargs):
    if not manager_is_ours(serving.tokenizer_manager):
        return original(serving, *args, **kwargs)
    from dspark.host import parsers

    return parsers.finish_tool_calls(original, serving, *args, **kwargs)


def finish_reasoning(original, serving, *args, **kwargs):
    if not manager_is_ours(serving.tokenizer_manager):
        return original(serving, *args, **kwargs)
    from dspark.host import parsers

    return parsers.finish_reasoning(original, serving, *args, **kwargs)


def hold_back_before_half_characters(original, req):
    """Req.check_match_stop_str_prefix: whether the end of the text must not be sent yet."""
    if original(req):
        return True
    if not req.sampling_params.stop_strs or not is_ours():
        return False
    from dspark.host import stream_interval

    return stream_interval.may_become_stop(req.tail_str(), req.sampling_params.stop_strs)


def send_after_enough_tokens(original, accumulator, *, req):
    """_GenerationStreamAccumulator.accept, which waits for numbers that a step may jump over."""
    if not req.stream or req.finished() or not is_ours():
        return original(accumulator, req=req)
    from dspark.host import stream_interval

    return stream_interval.accept(original, accumulator, req)


def stream_responses(
    original, serving, request, sampling_params, result_generator, *args, **kwargs
):
    """OpenAIServingResponses.responses_stream_generator_non_harmony."""
    manager = serving.tokenizer_manager
    if manager_is_ours(manager):
        from dspark.host import parsers

        incremental = manager.server_args.incremental_streaming_output
        result_generator = parsers.marking_the_last(result_generator, incremental)
    return original(serving, request, sampling_params, result_generator, *args, **kwargs)


async def count_as_responses_do(original, serving, *args, **kwargs):
    """OpenAIServingResponses.create_responses and those that look a response up.

    SGLang counts tokens of a whole response by the names of chat completions, where no client of
    this endpoint looks.
    """
    answer = await original(serving, *args, **kwargs)
    usage = getattr(answer, "usage", None)
    if usage is None or not manager_is_ours(serving.tokenizer_manager):
        return answer
    return answer.model_dump() | {"usage": response_usage(usage)}


def response_usage(usage) -> dict[str, Any]:
    """UsageInfo of SGLang -> `usage` of a response, as the last event of a stream has it."""
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
