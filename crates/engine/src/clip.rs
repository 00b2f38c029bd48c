//! Clipping by whoever trains, beside what the options clip in each step.

use crate::groups::Message;
use crate::{ConfigError, Engine, EngineError, Norm};

impl Engine {
    /// Measures the window's gradients, those of all parameters and ranks together, and where the
    /// norm is above `max_norm` divides them all by `norm / max_norm`; a collective call, between
    /// the last `backward_end` of a window and its step. Returns the norm before, each element
    /// counted once. Gradients of a norm that is not finite stay as they are, and the step judges
    /// them. What the options clip comes on top, in the step.
    ///
    /// # Errors
    ///
    /// On every rank, if `max_norm` is negative or NaN, if ranks ask for different norms, and at
    /// another time, as for [`full_grads`](Self::full_grads).
    pub fn clip_grads(&mut self, max_norm: f64, norm: Norm) -> Result<f64, EngineError> {
        if max_norm.is_nan() || max_norm < 0.0 {
            let (field, value) = ("max_norm".into(), max_norm.to_string());
            let refused = ConfigError::Value { field, value, allowed: "0 or above".into() };
            return Err(self.refuse("clip_grads", None, EngineError::Config(refused)));
        }
        let divisor = self.begin_read(&format!("clip_grads {max_norm} {norm:?}"), None)?;
        let mut part = 0.0;
        for piece in self.measure(norm, divisor).into_iter().filter(|piece| piece.counts) {
            norm.add(piece.measured, &mut part);
        }
        let told = self.groups.exchange(Message::NormParts, "clip_grads", &part.to_le_bytes());
        let told = told.map_err(|error| self.fail(error))?;
        let part = |bytes: &Vec<u8>| {
            f64::from_le_bytes(bytes.as_slice().try_into().expect("eight bytes were exchanged"))
        };
        let measured = norm.of_parts(told.iter().map(part));
        if measured.is_finite() && measured > max_norm {
            self.divide_window((measured / max_norm) as f32);
        }
        Ok(measured)
    }
}
