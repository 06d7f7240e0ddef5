//! Which types are `Send` and `Sync`, checked by the compiler: a line here that stops compiling is a broken promise.

use ctxalloc::{Buffer, Context, ContextAlloc, Error, Guard, Handler, Scoped, Scratch, Token};
use std::marker::PhantomData;
use std::panic::{RefUnwindSafe, UnwindSafe};

// A constant of the type itself is found before that of a trait, where its bounds hold: a way to ask for the absence
// of an auto trait without a compiler that fails.
struct AskSend<T>(PhantomData<T>);
struct AskSync<T>(PhantomData<T>);

impl<T: Send> AskSend<T> {
    const ANSWER: bool = true;
}

impl<T: Sync> AskSync<T> {
    const ANSWER: bool = true;
}

trait Otherwise {
    const ANSWER: bool = false;
}

impl<T> Otherwise for AskSend<T> {}
impl<T> Otherwise for AskSync<T> {}

fn travels<T: Send + Sync + Unpin + UnwindSafe + RefUnwindSafe + 'static>() {}

#[test]
fn handlers_contexts_and_owners_travel() {
    travels::<Handler>();
    travels::<Context>();
    travels::<Buffer>();
    travels::<ContextAlloc>();
    travels::<Error>();
    const { assert!(AskSend::<Buffer>::ANSWER && AskSync::<Buffer>::ANSWER) };
    travels::<Scoped<std::future::Ready<()>>>();
}

#[test]
fn a_token_may_be_sent_but_not_shared() {
    fn sent<T: Send + 'static>() {}
    sent::<Token>();
    const { assert!(!AskSync::<Token>::ANSWER) };
}

#[test]
fn a_scratch_may_be_sent_but_not_shared() {
    fn sent<T: Send + 'static>() {}
    sent::<Scratch>();
    const { assert!(!AskSync::<Scratch>::ANSWER) };
}

#[test]
fn a_guard_stays_on_its_thread() {
    const { assert!(!AskSend::<Guard>::ANSWER) };
    const { assert!(!AskSync::<Guard>::ANSWER) };
}

#[test]
fn a_scoped_future_is_send_exactly_if_its_inner_one_is() {
    const { assert!(AskSend::<Scoped<std::future::Ready<()>>>::ANSWER) };
    const { assert!(!AskSend::<Scoped<std::future::Ready<std::rc::Rc<()>>>>::ANSWER) };
}

#[test]
fn small_things_are_small() {
    assert_eq!(size_of::<Handler>(), size_of::<usize>());
    assert_eq!(size_of::<Option<Handler>>(), size_of::<usize>());
    assert_eq!(size_of::<Context>(), 2 * size_of::<usize>());
    assert_eq!(size_of::<ContextAlloc>(), size_of::<usize>());
    assert_eq!(size_of::<Buffer>(), 5 * size_of::<usize>()); // with its capacity
}
