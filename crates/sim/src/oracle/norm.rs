//! The size of a gradient.

/// The size of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// This root of the sum of so many-th powers of magnitudes.
    Power(i32),
    /// The largest magnitude.
    Infinity,
}

impl Norm {
    /// Not a number if an element is none.
    pub(super) fn of<'a>(self, grads: impl Iterator<Item = &'a f32>) -> f64 {
        let grads = grads.map(|grad| f64::from(grad.abs()));
        match self {
            Self::Power(power) => {
                grads.map(|grad| grad.powi(power)).sum::<f64>().powf(1.0 / f64::from(power))
            }
            Self::Infinity => {
                grads.fold(
                    0.0,
                    |largest, grad| {
                        if largest.is_nan() || grad <= largest { largest } else { grad }
                    },
                )
            }
        }
    }
}
