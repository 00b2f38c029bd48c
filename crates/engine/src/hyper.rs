//! Hyper-parameters of optimizer groups, which may change from one step to the next.

use oxizero_core::OptimGroup;
use oxizero_optim::{Hyper, Optimizer};

use crate::options::{GroupOptions, OptimizerSetup};
use crate::setup::{check_group, fingerprint};
use crate::{Engine, EngineError};

/// What parameters are updated with.
#[derive(Debug)]
pub(crate) struct HyperParams {
    pub(crate) setup: OptimizerSetup,
    /// By group: a rule of its own, which keeps the same states as the setup's.
    own: Vec<Option<Box<dyn Optimizer>>>,
    /// Tells whether ranks step with the same.
    fingerprint: u64,
}

/// How one parameter is updated in one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParamUpdate<'a> {
    /// Whose rule and hyper-parameters these are.
    group: OptimGroup,
    pub(crate) rule: &'a dyn Optimizer,
    pub(crate) hyper: Hyper,
    /// Counts the parameter's updates, from 1.
    pub(crate) step: u64,
}

impl ParamUpdate<'_> {
    /// Whether another parameter is updated so too, in the same step.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        self.group == other.group && self.step == other.step
    }
}

impl HyperParams {
    pub(crate) fn new(setup: OptimizerSetup) -> Self {
        let own = setup.groups.iter().map(|_| None).collect();
        let mut hyper = Self { setup, own, fingerprint: 0 };
        hyper.changed();
        hyper
    }

    fn changed(&mut self) {
        self.fingerprint = fingerprint(&format!("{:?} {:?}", self.setup.groups, self.own));
    }

    /// The learning rate of a group in the step after so many applied ones.
    pub(crate) fn lr(&self, group: usize, applied_steps: u64) -> Option<f64> {
        let factor = self.lr_factor(applied_steps);
        self.setup.groups.get(group).map(|options| options.lr * factor)
    }

    /// What the schedule multiplies learning rates by in the step after so many applied ones.
    pub(crate) fn lr_factor(&self, applied_steps: u64) -> f64 {
        self.setup.schedule.factor(applied_steps)
    }

    /// The groups' settings, and the rules of their own.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (GroupOptions, Option<&dyn Optimizer>)> {
        self.setup.groups.iter().copied().zip(self.own.iter().map(Option::as_deref))
    }

    /// The same on all ranks that are to step alike.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// How a parameter of a group is updated, for the `step`-th time, where the schedule gives
    /// `lr_factor`.
    pub(crate) fn update(&self, group: OptimGroup, step: u64, lr_factor: f64) -> ParamUpdate<'_> {
        let GroupOptions { lr, weight_decay } = self.setup.groups[group.0];
        let hyper = Hyper { lr: lr * lr_factor, weight_decay };
        let rule = self.own[group.0].as_ref().unwrap_or(&self.setup.rule);
        ParamUpdate { group, rule: &**rule, hyper, step }
    }
}

impl Engine {
    /// Changes a group's learning rate (before the schedule) and weight decay from the next step
    /// on. All ranks change them alike; a step that finds that they have not is an error on all.
    pub fn set_group(
        &mut self,
        group: OptimGroup,
        options: GroupOptions,
    ) -> Result<(), EngineError> {
        check_group(&options)?;
        self.check_group_index(group)?;
        self.hyper.setup.groups[group.0] = options;
        self.hyper.changed();
        Ok(())
    }

    /// Gives a group an update rule of its own, such as one with other betas, from the next step
    /// on. It must keep the states that the engine was made for. All ranks do so alike.
    pub fn set_rule(
        &mut self,
        group: OptimGroup,
        rule: Box<dyn Optimizer>,
    ) -> Result<(), EngineError> {
        self.check_group_index(group)?;
        let kept = self.hyper.setup.rule.state_names();
        if rule.state_names() != kept {
            let name = rule.state_names().join(", ");
            return Err(EngineError::UnknownState { name, kept: kept.join(", ") });
        }
        self.hyper.own[group.0] = Some(rule);
        self.hyper.changed();
        Ok(())
    }

    fn check_group_index(&self, group: OptimGroup) -> Result<(), EngineError> {
        let (index, count) = (group.0, self.hyper.setup.groups.len());
        let known = index < count;
        known.then_some(()).ok_or(EngineError::Unknown { what: "optimizer group", index, count })
    }
}
