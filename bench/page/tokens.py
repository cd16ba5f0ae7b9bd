"""Whether servers gave the same tokens."""

from collections.abc import Sequence

from dspark.bench.difference import Difference
from dspark.bench.page.parts import Record, Table, Verdict
from dspark.bench.table import counted


def same_tokens(record: Record) -> Verdict:
    """Of a pair, whose every output is compared with every other of its prompt."""
    if record["outputs_identical"] is None:
        return Verdict("open", "NOT COMPARED", "A server sends no token ids.")
    tokens = sum(
        level["tokens"]
        for one in record["rounds"]
        for levels in one["levels"].values()
        for level in levels
    )
    runs = counted(len(record["rounds"]), "round")
    return tokens_verdict(record["differences"], tokens, f"of both arms in {runs}")


def tokens_verdict(differences: Sequence[Record], tokens: int, of: str) -> Verdict:
    """differences: fields of `Difference`, and others, of each output that differs."""
    if not differences:
        return Verdict("good", "SAME TOKENS", f"All {tokens:,} tokens {of} are identical.")
    first = Difference(*(differences[0][name] for name in Difference._fields))
    differ = f"{counted(len(differences), 'output')} differ{'s' * (len(differences) == 1)}"
    return Verdict("bad", "DIFFERENT TOKENS", f"{differ}. First: {first}.")


def difference_table(record: Record) -> Table:
    rows = [
        [
            *(str(found[name]) for name in Difference._fields),
            f"{found['gap_nats']:.4f}",
        ]
        for found in record["differences"]
    ]
    return Table("", [*Difference._fields, "gap of the target's best two, nats"], rows)
