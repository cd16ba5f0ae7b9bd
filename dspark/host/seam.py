"""One place where this package meets SGLang, and short names of the classes it meets often."""

import enum
from typing import NamedTuple


class Use(enum.Enum):
    HOOK = "hooked"  # we run around it: its parameters must be exactly these
    BASE = "subclassed"
    CALL = "called"
    TABLE = "registered in"


class Seam(NamedTuple):
    target: str  # dotted path below `sglang.srt.`
    use: Use
    parameters: tuple[str, ...] = ()  # all of them for HOOK, those we rely on otherwise

    @property
    def path(self) -> str:
        return f"sglang.srt.{self.target}"


KVC = "mem_cache.kv_cache_configurator.KVCacheConfigurator"
REQUEST_POOL = "mem_cache.memory_pool.ReqToTokenPool"
MANAGER = "managers.tokenizer_manager.TokenizerManager"
SIGNALS = "managers.tokenizer_manager.SignalHandler"
WATCHDOG = "utils.watchdog.SubprocessWatchdog"
LOADER = "model_loader.loader.DefaultModelLoader"
CHAT = "entrypoints.openai.serving_chat.OpenAIServingChat"
RESPONSES = "entrypoints.openai.serving_responses.OpenAIServingResponses"
ENGINE = "entrypoints.engine.Engine"
STREAMER = "managers.scheduler_components.output_streamer._GenerationStreamAccumulator"
PROFILER = "managers.scheduler_components.profiler_manager.SchedulerProfilerManager"
SAMPLER = "layers.sampler.Sampler"
SWA_ALLOCATOR = "mem_cache.allocator.swa.SWATokenToKVPoolAllocator"
PAGED_ALLOCATOR = "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
RESULTS = "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
REPORTER = "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
DRAFT_INPUT = "speculative.dflash_info_v2.DFlashDraftInputV2"
SPEC_WORKER = "speculative.base_spec_worker.BaseSpecWorker"
