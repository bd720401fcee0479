"""chain: any policy over any store whose rows stand alone."""

from vq_functional.core.errors import check
from vq_functional.core.policy import Policy, check_policy
from vq_functional.core.store import RowStore, Store
from vq_functional.core.transform import Transform
from vq_functional.evict.engine import Evicting


def chain(policy: Policy, store: Store, *, name: str | None = None) -> Transform:
    """Evict by `policy`, hold the survivors in `store`.

    Evicting moves rows as the store holds them and never encodes them again.
    Raises QuantizerConfigError for a store whose rows share scales along tokens,
    for a transform that itself drops rows, and for a policy whose budget has no
    room for the rows that it protects.
    """
    rule = "must be a policy, such as h2o_policy(budget=256)"
    check(isinstance(policy, Policy), "chain", "policy", rule, policy)
    check_policy(policy.name, policy.budget, policy.n_sink, policy.recent, policy.protect, free=0)
    bed, held = f"to be a bed for {policy.name}", getattr(store, "name", store)
    both = f"{policy.name} over {held}"
    rule = f"must keep every row, as rows(key=..., value=...) does, {bed}"
    check(isinstance(store, Store), both, "store", rule, held)
    rule = f"must hold rows that stand alone, {bed}: the rows of {held} share scales"
    check(store.take and isinstance(store, RowStore), both, "store", rule, held)
    return Evicting(name or both, policy, store)  # type: ignore[arg-type]
