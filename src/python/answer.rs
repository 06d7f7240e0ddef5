//! The answer to a refusal, for the middlewares: Rust decides (`crate::answer`).

use super::budget::PyBudget;
use crate::answer::Answer;
use pyo3::prelude::*;

/// The status and the problem document for a refusal, by the numbers of its BudgetExceeded, of a request that is
/// charged to `tenant`.
#[pyfunction]
#[pyo3(name = "_answer", signature = (refusal, held_bytes, requested_bytes, tenant, /))]
pub(super) fn answer(
    refusal: (Option<u64>, bool, usize),
    held_bytes: usize,
    requested_bytes: usize,
    tenant: Option<&Bound<'_, PyBudget>>,
) -> (u16, &'static str) {
    let (budget_id, of_request, limit_bytes) = refusal;
    let needed_bytes = held_bytes.saturating_add(requested_bytes);
    let tenant = tenant.map(|budget| budget.get().budget().id());
    let answer = Answer::of(budget_id, of_request, limit_bytes, needed_bytes, tenant);
    (answer.status(), answer.document())
}
