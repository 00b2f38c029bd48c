//! The simulated world and the oracle that the oxizero engine is checked against
