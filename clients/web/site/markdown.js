import{b as a}from"./chunk-HMFPRXCJ.js";import"./chunk-YMPDT7D7.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
