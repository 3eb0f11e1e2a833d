//! A continuation as text.

use std::ops::ControlFlow;

use super::{Continuation, Finish, Request, Session};
use crate::failure::Outcome;
use crate::text::{StopMatcher, Streamer, Tokenizer};

/// A continuation as text.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The text, without special tokens and without the stop string that ended it; none without a tokenizer.
    pub text: String,
    /// Why it ended, stop strings told apart.
    pub finish: Finish,
    /// Its tokens.
    pub continuation: Continuation,
}

impl Session<'_> {
    /// Continues `prompt` as [`Session::generate`] does, up to one of `stops` at most.
    ///
    /// `show` is given text as soon as no later token can change it, and says whether to go on. `request.stop` is asked
    /// after each token too.
    ///
    /// # Errors
    /// As [`Session::generate`]; those of the tokenizer, of the stop strings, and of `show`.
    pub fn answer(
        &mut self,
        prompt: &[u32],
        request: Request<'_>,
        tokenizer: Option<&Tokenizer>,
        stops: &[&str],
        show: &mut dyn FnMut(&str) -> Outcome<bool>,
    ) -> Outcome<Answer> {
        let stop = request.stop;
        let mut stream = tokenizer.map(|tokenizer| Streamer::new(tokenizer, true));
        let mut matcher = StopMatcher::new(stops)?;
        let (mut text, mut failed) = (String::new(), None);
        let mut put = |piece: &str| {
            text.push_str(piece);
            show(piece)
        };
        let continuation = self.generate(prompt, request, &mut |token| {
            let mut step = || match &mut stream {
                Some(stream) => put(matcher.push(stream.push(token)?)),
                None => Ok(true),
            };
            let wanted = step().unwrap_or_else(|error| {
                failed = Some(error);
                false
            });
            match !wanted || matcher.stopped() || stop() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        if let Some(stream) = stream {
            put(matcher.push(&stream.finish()?))?;
        }
        // Text that was held back for a later token may have completed a stop string.
        let finish = match matcher.stopped() {
            true => Finish::StopString,
            false => {
                put(&matcher.finish())?;
                continuation.finish
            }
        };
        Ok(Answer { text, finish, continuation })
    }
}
