//! The handlers that are in every table from the start, a line for each.

use super::entry::Draft;
use super::name::Name;
use super::requests::ended::Ended;
use super::table::Table;
use super::trampoline;
use super::word::Handler;
use crate::source::{HugePages, LockedPages};
use crate::strategy::{Aligned, Guard, GuardOptions, Pool, PoolOptions, Strategy, System, Tracked};

/// Registers them all. Returns `system`, the default of a process without NumPy, and [`Ended`], which takes the place
/// of a request's handler when nothing is left of the request.
///
/// This is cheap: nothing is mapped, locked or installed before the first block is asked for.
pub(super) fn register_all(table: &Table) -> (Handler, Handler) {
    let system = add(table, "system", System);
    add(table, "aligned64", Aligned::CACHE_LINE);
    let pool = if cfg!(ctxalloc_loom) { Pool::new() } else { Pool::shared().clone() };
    add_draft(table, "pool", |name| trampoline::draft_at_hand(name, pool.clone()));
    add(table, "tracked", Tracked::new(pool).expect("a pool is not tracked"));
    if !cfg!(ctxalloc_loom) {
        add(table, "hugepages", Pool::over(HugePages::transparent(), PoolOptions::default()));
        add(table, "locked", Pool::over(LockedPages::untried(), PoolOptions::default()));
        add(table, "guard", Guard::new(GuardOptions::default()).expect("the default options are in range"));
    }
    (system, add(table, Ended::NAME, Ended))
}

fn add<S: Strategy>(table: &Table, name: &str, strategy: S) -> Handler {
    add_draft(table, name, |name| trampoline::draft(name, strategy))
}

fn add_draft<'a>(table: &Table, name: &'a str, draft: impl FnOnce(Name<'a>) -> Draft<'a>) -> Handler {
    Name::new(name)
        .and_then(|name| table.register(draft(name)))
        .expect("built-in names are valid and distinct, and the table is new")
        .0
}
