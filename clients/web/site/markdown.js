import{b as a}from"./chunk-N5FSLME7.js";import"./chunk-GK7X5RTZ.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
