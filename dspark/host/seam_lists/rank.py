"""Seams: ranks that die (launcher process)."""

from dspark.host.seam import SIGNALS, WATCHDOG, Seam, Use

SEAMS = (
    Seam(
        "entrypoints.engine.Engine._launch_scheduler_processes",
        Use.HOOK,
        ("server_args", "port_args", "run_scheduler_process_func"),
    ),
    Seam(
        "entrypoints.engine._wait_for_scheduler_ready",
        Use.HOOK,
        ("scheduler_pipe_readers", "scheduler_procs"),
    ),
    Seam(f"{SIGNALS}.running_phase_sigquit_handler", Use.HOOK, ("self", "signum", "frame")),
    Seam(f"{WATCHDOG}.start", Use.HOOK, ("self",)),
    Seam(f"{WATCHDOG}.stop", Use.HOOK, ("self",)),
)
