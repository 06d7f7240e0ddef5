//! The answer to a refusal, for the middlewares: Rust decides (`crate::answer`).

use super::budget::PyBudget;
use crate::answer::Answer;
use crate::room::retry_after;
use pyo3::prelude::*;

/// The status and the problem document for a refusal, by the numbers of its BudgetExceeded, of a request that is
/// charged to `tenant` (`never_fits`: of a reservation that would not fit if it were alone, beside what is guaranteed to
/// others); and after how many seconds a second try may succeed, by how fast those get room who wait for
/// that budget: None where it is not known, or nobody can succeed.
#[pyfunction]
#[pyo3(name = "_answer", signature = (refusal, held_bytes, requested_bytes, tenant, never_fits, /))]
pub(super) fn answer(
    refusal: (Option<u64>, bool, usize),
    held_bytes: usize,
    requested_bytes: usize,
    tenant: Option<&Bound<'_, PyBudget>>,
    never_fits: bool,
) -> (u16, &'static str, Option<f64>) {
    let (budget_id, of_request, limit_bytes) = refusal;
    let needed_bytes = held_bytes.saturating_add(requested_bytes);
    let tenant = tenant.map(|budget| budget.get().budget().id());
    let answer = match never_fits {
        true => Answer::TooLarge,
        false => Answer::of(budget_id, of_request, limit_bytes, needed_bytes, tenant),
    };
    let is_final = matches!(answer, Answer::TooLarge);
    let seconds = budget_id.filter(|_| !is_final).and_then(retry_after).map(|time| time.as_secs_f64());
    (answer.status(), answer.document(), seconds)
}
