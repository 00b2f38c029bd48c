//! What the front-end refuses.

use oxizero_core::UnitId;

/// A model that cannot be trained as it stands.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BurnError {
    /// burn shows it as a parameter, but it wants no gradient.
    #[error(
        "`{name}` has a value and wants no gradient (a running statistic, or frozen): it would be \
         trained or lost; use a layer without running statistics (RMS or layer norm), and freeze \
         parameters by `ModelBuilder::adjust`"
    )]
    NotTrained {
        /// The parameter's name in its module.
        name: String,
    },
    /// A tied parameter is used in two units.
    #[error(
        "`{name}` is used in unit {first} and in unit {second}: segments that share a parameter \
         must name one unit"
    )]
    TiedAcrossUnits {
        /// The parameter's name.
        name: String,
        /// The unit that uses it first.
        first: UnitId,
        /// The other unit.
        second: UnitId,
    },
    /// Two uses of a parameter disagree about its shape.
    #[error("`{name}` has the shape {first:?} in one segment and {second:?} in another")]
    TiedShapes {
        /// The parameter's name.
        name: String,
        /// Its shape where it is used first.
        first: Vec<usize>,
        /// Its shape elsewhere.
        second: Vec<usize>,
    },
}
