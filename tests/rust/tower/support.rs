//! Bodies that end in all the ways in which one may, and a layer that reports each end.

use bytes::Bytes;
use ctxalloc::Buffer;
use ctxalloc::tower::{Ended, Outcome, RequestLayer, ResponseBody};
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::mpsc::{Receiver, channel};
use std::task::{Context, Poll, Waker};

/// What a [`Scripted`] body does when it is polled.
pub(crate) enum Step {
    Data(&'static str),
    Trailers,
    Wait,
    Fail,
    Panic,
}

/// A body that does what it is told, holds memory of its request while it lives, and allocates at each poll.
pub(crate) struct Scripted {
    pub(crate) steps: VecDeque<Step>,
    pub(crate) length: Option<u64>,
    /// Whether it says after its last step that it is over, or only at the poll after that.
    pub(crate) says_so: bool,
    pub(crate) _held: Buffer,
}

impl Scripted {
    pub(crate) fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        let _held = Buffer::zeroed(100).unwrap();
        Self { steps: steps.into_iter().collect(), length: None, says_so: false, _held }
    }
}

impl Body for Scripted {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        drop(Buffer::zeroed(1000).unwrap());
        match self.steps.pop_front() {
            Some(Step::Data(text)) => Poll::Ready(Some(Ok(Frame::data(text.into())))),
            Some(Step::Trailers) => Poll::Ready(Some(Ok(Frame::trailers(http::HeaderMap::new())))),
            Some(Step::Wait) => Poll::Pending,
            Some(Step::Fail) => Poll::Ready(Some(Err(io::Error::other("it fails")))),
            Some(Step::Panic) => panic!("it panics"),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.says_so && self.steps.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::new, SizeHint::with_exact)
    }
}

/// A layer, and the ends that it reports.
pub(crate) fn reporting() -> (RequestLayer, Receiver<Ended>) {
    let (report, ends) = channel();
    (RequestLayer::new().on_end(move |ended| report.send(ended.clone()).unwrap()), ends)
}

/// The one end that was reported.
#[track_caller]
pub(crate) fn once(ends: &Receiver<Ended>) -> Ended {
    let ended = ends.try_recv().expect("its end was reported");
    assert!(ends.try_recv().is_err(), "its end was reported twice");
    ended
}

#[track_caller]
pub(crate) fn assert_outcome(ends: &Receiver<Ended>, outcome: Outcome) -> Ended {
    let ended = once(ends);
    assert_eq!(ended.outcome, outcome);
    ended
}

pub(crate) fn get() -> Request<()> {
    Request::new(())
}

/// An answer with this body.
pub(crate) async fn answer(body: Scripted) -> Result<Response<Scripted>, Infallible> {
    Ok(Response::new(body))
}

type Polled<B> = Poll<Option<Result<Frame<<B as Body>::Data>, <B as Body>::Error>>>;

/// One poll of a body, as a server does it.
pub(crate) fn poll<B>(body: &mut Pin<Box<ResponseBody<B>>>) -> Polled<B>
where
    B: Body,
    B::Data: From<&'static [u8]>,
{
    body.as_mut().poll_frame(&mut Context::from_waker(Waker::noop()))
}

/// What a future that never waits returns.
pub(crate) fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("it waits"),
    }
}
