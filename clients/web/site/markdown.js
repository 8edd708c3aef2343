import{b as a}from"./chunk-B2G3T465.js";import"./chunk-D6FVQYGP.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
