"""chain: any policy over any store whose rows stand alone."""

from vq_functional.core.errors import check
from vq_functional.core.policy import Policy
from vq_functional.core.store import RowStore, Store
from vq_functional.core.transform import Transform
from vq_functional.evict.engine import Evicting


def chain(policy: Policy, store: Store, *, name: str | None = None) -> Transform:
    """Evict by `policy`, hold the survivors in `store`.

    Evicting moves rows as the store holds them and never encodes them again.
    Raises QuantizerConfigError for a store whose rows share scales along tokens,
    and for a transform that itself drops rows.
    """
    both = f"{policy.name} over {store.name}"
    check(isinstance(store, Store), both, "store", f"must keep every row, to be a bed for {policy.name}", store.name)
    rule = f"must hold rows that stand alone, to be a bed for {policy.name}: the rows of {store.name} share scales"
    check(store.take and isinstance(store, RowStore), both, "store", rule, store.name)
    return Evicting(name or both, policy, store)  # type: ignore[arg-type]
