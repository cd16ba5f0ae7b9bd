"""Hooks: ranks that die or stop."""

from dspark.host import arguments


def watch_ranks(original, engine, server_args, port_args, run_scheduler_process_func):
    """Engine._launch_scheduler_processes: they are watched before they have loaded anything."""
    started = original(engine, server_args, port_args, run_scheduler_process_func)
    if arguments.is_deepseek_v4(server_args):
        from dspark.host import rank_watch

        _, processes = started
        rank_watch.begin(processes, server_args.node_rank * len(processes))
    return started


def blame_before_giving_up(original, *args):
    """Where SGLang learns that a rank has failed while the server starts."""
    from dspark.host import rank_watch

    try:
        return original(*args)
    except RuntimeError:
        rank_watch.blame()
        raise


def blame_before_ending(original, handler, signum=None, frame=None):
    """Where SGLang learns that a rank has failed while the server runs."""
    from dspark.host import rank_watch

    rank_watch.blame()
    return original(handler, signum, frame)


def watch_no_rank_twice(original, watchdog):
    """SubprocessWatchdog.start: the ranks are ours to watch, the rest is SGLang's."""
    from dspark.host import rank_watch

    if rank_watch.is_of_server(watchdog):
        rank_watch.leave_ranks_out(watchdog)
    return original(watchdog)


def stop_watching(original, watchdog):
    """SubprocessWatchdog.stop: SGLang calls it before it ends its own processes."""
    from dspark.host import rank_watch

    if rank_watch.is_of_server(watchdog):
        rank_watch.stop()
    return original(watchdog)
