//! The answer to a client when a budget has refused: a status, and a problem document (RFC 9457). A leaf: imports no
//! layer.
//!
//! The layer for tower and Python's middlewares both use it, so that they give the same answer. The document names no
//! budget and no number, because strangers read it.

#[cfg(any(test, feature = "tower"))]
use crate::error::Error;

/// The answer to a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// 413: a second try cannot succeed.
    TooLarge,
    /// 429: the tenant's budget is used up by others of that tenant.
    TenantBusy,
    /// 503: another budget is used up.
    Busy,
}

impl Answer {
    /// The answer to a refusal of a request that is charged to the budget `tenant`; `None` if the error is none of a
    /// budget.
    #[cfg(any(test, feature = "tower"))]
    pub(crate) fn to(error: &Error, tenant: Option<u64>) -> Option<Self> {
        let (budget_id, of_request, limit_bytes, held_bytes, requested_bytes) = match *error {
            // Whatever it holds: alone it would not have been chosen.
            Error::BudgetExceeded { budget_id, limit_bytes, chosen_for: Some(_), .. } => {
                (budget_id, false, limit_bytes, 0, 0)
            }
            Error::BudgetExceeded {
                budget_id,
                of_request,
                limit_bytes,
                held_bytes,
                requested_bytes,
                guaranteed_bytes,
                ..
            } => {
                let is_limited = limit_bytes != usize::MAX;
                let can_have_bytes = limit_bytes.saturating_sub(if is_limited { guaranteed_bytes } else { 0 });
                (budget_id, of_request, can_have_bytes, held_bytes, requested_bytes)
            }
            Error::NoRoom { reason: crate::error::NoRoom::NeverFits, .. } => return Some(Self::TooLarge),
            // Before its beginning a request holds nothing.
            Error::NoRoom { budget_id, of_request, limit_bytes, requested_bytes, .. } => {
                (budget_id, of_request, limit_bytes, 0, requested_bytes)
            }
            _ => return None,
        };
        Some(Self::of(Some(budget_id), of_request, limit_bytes, held_bytes.saturating_add(requested_bytes), tenant))
    }

    /// The same, from numbers. `needed_bytes` is what the request holds together with what it asked for. `budget_id` is
    /// `None` if it is not known which budget refused.
    pub(crate) fn of(
        budget_id: Option<u64>,
        of_request: bool,
        limit_bytes: usize,
        needed_bytes: usize,
        tenant: Option<u64>,
    ) -> Self {
        let is_unlimited = limit_bytes == usize::MAX; // it refused what cannot be counted
        let is_tenants = budget_id.is_some() && budget_id == tenant;
        if needed_bytes > limit_bytes || is_unlimited {
            Self::TooLarge // also if the request were alone
        } else if is_tenants {
            Self::TenantBusy // first: a tenant's budget may be that of a request that lives long
        } else if of_request {
            Self::TooLarge
        } else {
            Self::Busy
        }
    }

    /// The status of HTTP.
    pub(crate) fn status(self) -> u16 {
        match self {
            Self::TooLarge => 413,
            Self::TenantBusy => 429,
            Self::Busy => 503,
        }
    }

    /// The problem document, in JSON.
    pub(crate) fn document(self) -> &'static str {
        match self {
            Self::TooLarge => {
                r#"{"type":"about:blank","title":"Content Too Large","status":413,"detail":"The request needs more memory than it may have."}"#
            }
            Self::TenantBusy => {
                r#"{"type":"about:blank","title":"Too Many Requests","status":429,"detail":"The memory that this client may have is in use."}"#
            }
            Self::Busy => {
                r#"{"type":"about:blank","title":"Service Unavailable","status":503,"detail":"The memory of this service is in use."}"#
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Answer::{self, Busy, TenantBusy, TooLarge};
    use crate::error::Error;

    const TENANT: u64 = 7;
    const OTHER: u64 = 8;

    /// Which budget, whether it is a request's limit, its limit, what the request holds, what it asked for, the answer.
    const TABLE: [(u64, bool, usize, usize, usize, Answer); 11] = [
        (OTHER, true, 100, 90, 20, TooLarge),
        (OTHER, true, 100, 0, 20, TooLarge), // of a request inside, or around
        (TENANT, false, 100, 0, 20, TenantBusy),
        (TENANT, false, 100, 80, 20, TenantBusy),
        (TENANT, false, 100, 81, 20, TooLarge), // alone, too, it would not fit
        (TENANT, false, 100, 0, 101, TooLarge),
        (TENANT, true, 100, 0, 20, TenantBusy), // the budget of a request that lives long, as a tenant's
        (OTHER, false, 100, 0, 20, Busy),
        (OTHER, false, 100, 81, 20, TooLarge),
        (OTHER, false, 0, 0, 1, TooLarge),
        (OTHER, false, usize::MAX, 5, usize::MAX, TooLarge),
    ];

    #[test]
    fn the_answer_says_whether_a_second_try_may_succeed() {
        for (budget_id, of_request, limit_bytes, held_bytes, requested_bytes, expected) in TABLE {
            let budget = "the same name".to_owned();
            let in_use_bytes = limit_bytes;
            let error = Error::BudgetExceeded {
                budget,
                budget_id,
                of_request,
                limit_bytes,
                in_use_bytes,
                held_bytes,
                requested_bytes,
                chosen_for: None,
                guaranteed_bytes: 0,
            };
            assert_eq!(Answer::to(&error, Some(TENANT)), Some(expected), "{error:?}");
        }
        assert_eq!(Answer::to(&Error::TokenUsed, None), None);
        assert_eq!(
            Answer::of(None, false, 100, 20, None),
            Busy,
            "an unknown budget is not the tenant's, of which there is none"
        );
    }

    #[test]
    fn each_document_has_the_status_that_it_goes_with() {
        for answer in [TooLarge, TenantBusy, Busy] {
            let document = answer.document();
            assert!(document.contains(&format!("\"status\":{}", answer.status())), "{document}");
        }
    }
}
