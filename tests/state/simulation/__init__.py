"""A small server around the real `dspark.state` and the real step planner, checked by an oracle.

Rows carry one number derived from the whole token prefix, and an entry is the list of the numbers
it was formed from, so a wrong, missing or stale row shows up exactly. Modules, bottom up:

* `oracle`: token sequences and what every entry must be.
* `stream`: launches that execute now (sync) or after the next scheduling round (overlap).
* `device`: pools, forward and rollback; it checks everything a forward reads.
* `memory`: page lists and the prefix tree with its host tier.
* `server`: the scheduler: admission, chunks, verify, release, eviction, load, flush.
* `faults`: deliberate mutations, each of which the checks must catch.
* `driver`: a random operator for long runs.
"""
